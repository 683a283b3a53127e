"""Replicas: the choice of one, and processes that are killed under load."""

import asyncio
import os
import signal
import threading
import time

import numpy as np
import pytest
import services

from tessera.core.errors import ArgumentError, ExecutionError, ShapeError
from tessera.serving import (
    InferenceRequest,
    LoadBalancer,
    ProcessReplica,
    ServedModel,
    ServerOptions,
    TensorDescription,
    ThreadReplica,
)
from tessera.serving.replicas import ReplicaLostError


def test_least_connections():
    async def main():
        gate = threading.Event()
        balancer = LoadBalancer([ThreadReplica(lambda x: gate.wait(5) and x, str(i)) for i in range(3)])
        chosen, tasks = [], []
        for _ in range(7):
            replica = balancer.select()
            chosen.append(replica.name)
            tasks.append(asyncio.ensure_future(replica.execute({"input": np.ones(1)})))
            await asyncio.sleep(0)
        actives = sorted(r.active for r in balancer.replicas)
        gate.set()
        await asyncio.gather(*tasks)
        return chosen, actives, [r.active for r in balancer.replicas]

    chosen, actives, after = asyncio.run(main())
    assert sorted(chosen[:3]) == sorted(chosen[3:6]) == ["0", "1", "2"] and actives == [2, 2, 3] and after == [0, 0, 0]


def test_round_robin_and_models_of_requests():
    balancer = LoadBalancer(2, strategy="round_robin")
    assert len({balancer.select().name for _ in range(2)}) == 2
    assert asyncio.run(balancer.infer(InferenceRequest({"a": [[1]], "b": [[2]]}, model=lambda d: d["a"] + d["b"]))) == 3
    with pytest.raises(ArgumentError, match="model"):
        asyncio.run(balancer.infer([[1.0]]))
    for wrong in (0, True, [], [len], "two"):
        with pytest.raises(ArgumentError):
            LoadBalancer(wrong)
    with pytest.raises(ArgumentError):
        LoadBalancer(1, strategy="random")


@pytest.fixture(scope="module")
def processes(scores):
    replicas = [ProcessReplica(scores, f"p{i}") for i in range(2)]
    yield LoadBalancer(replicas)
    for each in replicas:
        each.close()
        assert each._process.poll() is not None


def run_many(balancer, count, during=None):
    """The results of many requests at once."""
    x = [np.random.default_rng(i).normal(size=(1 + i % 3, 4)).astype(np.float32) for i in range(count)]

    async def main():
        tasks = [asyncio.ensure_future(balancer.run({"x": a})) for a in x]
        if during is not None:
            await during()
        return await asyncio.gather(*tasks)

    for a, found in zip(x, asyncio.run(main()), strict=True):
        np.testing.assert_allclose(found["out0"], services.want_scores(a)[0], rtol=1e-5)


def test_processes(processes):
    run_many(processes, 20)
    assert min(r.served for r in processes.replicas) > 0 and len({r.pid for r in processes.replicas}) == 2
    with pytest.raises(ShapeError):
        asyncio.run(processes.run({"x": np.ones((1, 4, 1), np.float32)}))


def test_no_request_is_lost_when_processes_are_killed(processes):
    before = [r.restarts for r in processes.replicas]

    async def kill():
        for replica in processes.replicas:
            await asyncio.sleep(0.01)
            os.kill(replica.pid, signal.SIGKILL)

    run_many(processes, 300, kill)
    deadline = time.time() + 60
    while not all(r.ready for r in processes.replicas) and time.time() < deadline:
        time.sleep(0.05)
    assert [r.restarts - b for r, b in zip(processes.replicas, before, strict=True)] == [1, 1]
    run_many(processes, 4)


@pytest.mark.parametrize(("lost", "works"), [([True, True], True), ([True] * 3, False), ([False] * 9 + [True], True)])
def test_requests_that_end_processes(lost, works):
    """A request may end two processes; one that waited for a process that another ended runs again without limit."""
    replica, left = ThreadReplica(lambda x: x), list(lost)

    async def execute(inputs, model=None):
        if left:
            error = ReplicaLostError("lost")
            error.started = left.pop()
            raise error
        return "result"

    replica.execute = execute
    balancer = LoadBalancer([replica])
    if works:
        assert asyncio.run(balancer.infer([[1.0]])) == "result"
    else:
        with pytest.raises(ReplicaLostError):
            asyncio.run(balancer.infer([[1.0]]))


def test_a_process_that_cannot_load_its_model(tmp_path):
    with pytest.raises(ExecutionError, match="cannot load") as found:
        ProcessReplica(tmp_path / "missing")
    assert "missing" in str(found.value)
    spec = [TensorDescription("x", "f32", (1,))]
    with pytest.raises(ArgumentError, match="path"):
        ServedModel("m", lambda x: x, ServerOptions(processes=True), inputs=spec, outputs=spec)
