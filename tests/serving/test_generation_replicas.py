"""Replicas of a language model: tokens are those of one engine, also where a process is killed between two of them."""

import asyncio
import os
import signal

import pytest

from benchmarks.serving import write_small_model
from tessera.core.errors import ArgumentError, ExecutionError
from tessera.llm import GenerationScheduler, Sampling, load
from tessera.serving import ServedLanguageModel, ServerOptions
from tessera.serving.generation_replicas import GenerationReplica

OPTIONS = ServerOptions(processes=True, replicas=2, slots=4, longest=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "text"
    write_small_model(path)
    return path


@pytest.fixture(scope="module")
def alone(folder):
    """A function: the tokens of a prompt alone, in this process."""
    scheduler = GenerationScheduler(load(folder, target="llvm"), slots=4, longest=128)

    def generate(prompt, count, sampling):
        made = scheduler.submit(prompt, count, sampling)
        scheduler.run()
        return made.tokens

    return generate


@pytest.fixture(scope="module")
def served(folder):
    made = ServedLanguageModel("text", load(folder, target="llvm"), OPTIONS, folder)
    yield made
    made.close()


async def collect(engine, prompt, count, sampling, between=None):
    found, reasons = [], []
    async for token, reason in engine.stream(prompt, count, sampling):
        found.append(token)
        reasons.append(reason)
        if between is not None and len(found) == 5:
            between()
    return found, reasons[-1]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=7)], ids=["greedy", "warm"])
def test_a_killed_replica_loses_no_token(served, alone, sampling):
    engine, prompts = served.engine, [[1 + i, 2, 3] for i in range(6)]
    before = [r.restarts for r in engine.replicas]

    async def main():
        kill = lambda: os.kill(max(engine.replicas, key=lambda r: r.open).pid, signal.SIGKILL)  # noqa: E731
        first = collect(engine, prompts[0], 30, sampling, kill)
        return await asyncio.gather(first, *(collect(engine, p, 30, sampling) for p in prompts[1:]))

    found = asyncio.run(main())
    assert [tokens for tokens, _ in found] == [alone(p, 30, sampling) for p in prompts]
    assert {reason for _, reason in found} == {"length"} and engine.open == 0

    async def wait():
        while not all(r.ready for r in engine.replicas):
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(wait(), 120))
    assert [r.restarts for r in engine.replicas] != before


def test_requests_go_to_both_replicas(served):
    async def main():
        tasks = [asyncio.ensure_future(collect(served.engine, [i], 100, Sampling())) for i in range(4)]
        while sum(r.open for r in served.engine.replicas) < 4 and not tasks[0].done():
            await asyncio.sleep(0)
        held = [r.open for r in served.engine.replicas]
        await asyncio.gather(*tasks)
        return held

    assert asyncio.run(main()) == [2, 2]
    assert [r.open for r in served.engine.replicas] == [0, 0]


def test_a_stream_that_is_closed_ends_its_request(served):
    async def main():
        stream = served.engine.stream([1, 2], 100)
        await anext(stream)
        await stream.aclose()
        return served.engine.open, await collect(served.engine, [3], 3, Sampling())

    left, (tokens, reason) = asyncio.run(main())
    assert left == 0 and len(tokens) == 3 and reason == "length"
    assert [r.open for r in served.engine.replicas] == [0, 0]


def test_mistakes(served, folder, tmp_path):
    with pytest.raises(ArgumentError, match="empty"):
        served.engine.check([], 4)
    with pytest.raises(ArgumentError, match="from a path"):
        ServedLanguageModel("text", served.model, OPTIONS)
    with pytest.raises(ExecutionError, match="cannot load"):
        GenerationReplica(tmp_path, "text 0", {"slots": 2})
