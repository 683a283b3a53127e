"""Predictions: times and bytes computed by hand from the stated model, stragglers, overlap, the timeline."""

import json
import time

import numpy as np
import pytest

import tessera as ts
from tessera.dist import Compute, Link, simulate
from tessera.errors import ArgumentError, CollectiveError, FileError

pytest.importorskip("simpy")
P = ts.dist.P
LINK, SLOW = Link(1e9, 1e-6), Link(1e8, 1e-5)
UNIT = Compute(matrix=1e12, flops=1e9, bandwidth=1e9, launch=0.0)


def test_kernels_and_collectives():
    mesh = ts.Mesh((2, 4), ("dp", "tp"))

    def program(x):
        y = ts.exp(x) * 2.0 + 1.0  # one kernel: 4 MB in, 4 MB out, at 1 GB/s
        return ts.all_reduce(y, axis="tp")

    found = simulate(program, mesh, ts.Tensor[1000, 1000, ts.f32], links={"dp": SLOW, "tp": LINK}, compute=UNIT)
    kernel, collective = 8e6 / 1e9, 2 * 4e6 * 3 / 4 / 1e9 + 2 * 3 * 1e-6
    assert found.seconds == pytest.approx(kernel + collective, rel=1e-9)
    np.testing.assert_allclose(found.busy(), kernel)
    np.testing.assert_allclose(found.busy("communication"), collective)
    assert found.memory.tolist() == [4_000_000 * 3] * 8  # x, exp(x) * 2 + 1, and the sum


def test_the_slowest_link_counts():
    mesh = ts.HierarchicalMesh({"node": 2, "gpu": 2})
    links = {"node": SLOW, "gpu": LINK}
    for axis, count, link in (("gpu", 2, LINK), ("node", 2, SLOW), (("node", "gpu"), 4, SLOW)):
        found = simulate(
            lambda x, a=axis: ts.all_gather(x, mesh.axis(*np.atleast_1d(a))), mesh, ts.ones((250,)), links=links
        )
        assert found.seconds == pytest.approx(1000 * (count - 1) / link.bandwidth + (count - 1) * link.latency)


def test_products():
    def program(x, w):
        return ts.relu(x @ w)

    types = ts.Tensor[64, 256, ts.bf16], ts.Tensor[256, 512, ts.bf16]
    found = simulate(program, ts.Mesh(4), *types, compute=Compute(matrix=1e9, flops=1e15, bandwidth=1e15, launch=1e-3))
    assert found.seconds == pytest.approx(2 * 64 * 256 * 512 / 1e9 + 1e-3, rel=1e-6)
    step = ts.spmd(program, in_specs=(None, P(None, "ranks")))
    parts = simulate(step, ts.Mesh(4), *types, compute=Compute(matrix=1e9, flops=1e15, bandwidth=1e15, launch=1e-3))
    assert parts.seconds == pytest.approx(2 * 64 * 256 * 128 / 1e9 + 1e-3, rel=1e-6)


def test_stragglers():
    mesh = ts.Mesh(4)

    def program(x):
        return ts.all_reduce(ts.exp(x)) * 2.0

    even = simulate(program, mesh, ts.ones((1000,)), links={"ranks": LINK}, compute=UNIT)
    found = simulate(program, mesh, ts.ones((1000,)), links={"ranks": LINK}, compute=UNIT, speeds={2: 0.25})
    kernel = 8000 / 1e9
    assert found.seconds - even.seconds == pytest.approx(2 * 3 * kernel)
    np.testing.assert_allclose(found.busy("wait")[[0, 1, 3]] - found.busy("wait")[2], 3 * kernel)
    assert found.busy()[2] == pytest.approx(4 * found.busy()[0])


def test_overlap():
    def program(x):
        total = ts.all_reduce(x)
        for _ in range(3):
            x = ts.softmax(x @ x)
        return x + total

    x = ts.Tensor[500, 500, ts.f32]
    apart, beside = (simulate(program, ts.Mesh(2), x, links={"ranks": LINK}, compute=UNIT, overlap=o) for o in (0, 1))
    moved = beside.busy("communication")[0]
    assert apart.seconds - beside.seconds == pytest.approx(moved, rel=1e-6)
    assert apart.busy()[0] == pytest.approx(beside.busy()[0]) and beside.busy("wait")[0] == 0


def test_messages_take_their_time_and_receivers_wait():
    def program(x):
        if ts.get_rank() == 0:
            ts.send(ts.exp(x), 1)
            return ts.exp(x * 2.0)
        return ts.recv(x, 0) + 1.0 if ts.get_rank() == 1 else x

    found = simulate(program, ts.Mesh(3), ts.ones((1000,)), links={"ranks": LINK}, compute=UNIT)
    kernel, moved = 8000 / 1e9, 4000 / 1e9 + 1e-6
    assert found.spans(1)[0].end == pytest.approx(kernel + moved) and found.seconds == pytest.approx(2 * kernel + moved)
    assert found.busy("communication").tolist() == pytest.approx([moved, 0, 0])
    assert found.busy("wait").tolist() == pytest.approx([0, kernel + moved, 0]) and not found.spans(2)


def test_the_bubble_of_pipelines():
    def make(schedule, ranks, micros):
        stages = [lambda p, a: ts.tanh(a @ p)] * ranks * (2 if schedule == "interleaved" else 1)
        pipeline = ts.dist.Pipeline(stages, lambda y, t: ((y - t) ** 2.0).mean(), micros, schedule)
        params = [ts.Tensor[64, 64, ts.f32]] * (len(stages) // ranks)
        types = ts.Tensor[64 * micros, 64, ts.f32], ts.Tensor[64 * micros, 64, ts.f32]
        return simulate(pipeline.value_and_grad, ts.Mesh(ranks), params, *types, links={"ranks": Link(1e15, 0.0)},
                        compute=Compute(flops=1e9, bandwidth=1e15, launch=0.0))  # fmt: skip

    for schedule in ("gpipe", "1f1b", "interleaved"):
        chunks = 2 if schedule == "interleaved" else 1
        found = make(schedule, 4, 8)
        idle = 1 - found.busy()[1:].mean() / found.seconds  # the first stage needs no gradient of its input
        assert idle == pytest.approx(ts.dist.bubble_share(4, 8, chunks), abs=0.04), schedule
    held, all_held = (make(s, 4, 16).programs[0] for s in ("1f1b", "gpipe"))
    assert held.peak_bytes - held.argument_bytes < 0.8 * (all_held.peak_bytes - all_held.argument_bytes)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            lambda x: ts.recv(x, 1) if ts.get_rank() == 0 else x,
            "rank 0 waits for ever: rank 1 sends no message with tag 0",
        ),
        (lambda x: ts.all_reduce(x) if ts.get_rank() else x, "rank 1 waits for ever: other ranks do not come"),
    ],
)
def test_ranks_that_wait_for_ever(program, text):
    with pytest.raises(CollectiveError, match=text) as found:
        simulate(program, ts.Mesh(2), ts.ones((2,)))
    assert found.value.location.file == __file__


def test_loops_count_their_steps():
    def make(length):
        return lambda x: ts.scan(lambda c, _: (ts.all_reduce(c * 2.0, "mean"), None), x, ts.zeros((length,)))[0]

    one, five = (simulate(make(n), ts.Mesh(2), ts.ones((100,))).busy("communication")[0] for n in (1, 5))
    assert five == pytest.approx(5 * one) and one > 0


def test_a_partitioned_function():
    mesh = ts.Mesh((2, 2), ("dp", "tp"))
    f = ts.dist.partition(lambda x, w: ts.gelu(x @ w).sum(), mesh=mesh, in_specs=(P("dp"), P(None, "tp")))
    x, w = ts.Tensor[64, 32, ts.f32], ts.Tensor[32, 128, ts.f32]
    found = simulate(f, mesh, x, w)
    planned = ts.dist.explain(f, x, w)
    assert found.busy("communication")[0] == pytest.approx(planned.seconds)
    assert found.programs[0].argument_bytes == 4 * (32 * 32 + 32 * 64)


def test_gradients_on_4096_devices():
    mesh = ts.Mesh((512, 8), ("dp", "tp"))
    column, row = P(None, "tp"), P("tp")

    def step(x, w, v):
        def loss(w, v):
            y = ts.gelu(ts.dist.column_parallel(x, w))
            return ts.all_reduce(ts.dist.row_parallel(y, v, axis="tp").mean(), "mean", axis="dp")

        return ts.dist.reduce_gradients(ts.grad(loss, argnums=(0, 1))(w, v), (column, row), mesh)

    types = ts.Tensor[4096, 1024, ts.bf16], ts.Tensor[1024, 4096, ts.bf16], ts.Tensor[4096, 1024, ts.bf16]
    start = time.monotonic()
    found = simulate(ts.spmd(step, in_specs=(P("dp"), column, row)), mesh, *types, links={"dp": ts.dist.NETWORK})
    assert time.monotonic() - start < 20
    assert found.memory.shape == (4096,) and found.programs[0].argument_bytes == 2 * (8 * 1024 + 2 * 1024 * 512)
    slow = simulate(ts.spmd(step, in_specs=(P("dp"), column, row)), mesh, *types, links={"dp": SLOW}, speeds={77: 0.5})
    assert slow.seconds > found.seconds and "4096 devices" in str(slow)


def test_timeline(tmp_path):
    found = simulate(lambda x: ts.all_reduce(ts.exp(x)), ts.Mesh((2, 2), ("a", "b")), ts.ones((64,)))
    found.save_trace(tmp_path / "trace.json", ranks=(0, 3))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0 {'a': 0, 'b': 0}", "rank 3 {'a': 1, 'b': 1}"]
    drawn = [e for e in events if e["ph"] == "X" and e["pid"] == 3]
    assert [e["cat"] for e in sorted(drawn, key=lambda e: e["ts"])][0] == "compute"
    assert max(e["ts"] + e["dur"] for e in drawn) == pytest.approx(found.seconds * 1e6)
    with pytest.raises(FileError):
        found.save_trace(tmp_path / "no" / "trace.json")


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"links": {"other": LINK}}, "no axis"),
        ({"links": {"ranks": 3}}, "the link"),
        ({"speeds": {9: 1.0}}, "no rank"),
        ({"speeds": {0: 0.0}}, "no speed"),
    ],
)
def test_refusals(named, text):
    with pytest.raises(ArgumentError, match=text):
        simulate(ts.exp, ts.Mesh(2), ts.ones((2,)), **named)
    with pytest.raises(ArgumentError, match="at most 4096"):
        simulate(lambda x: x, ts.Mesh(4097), ts.ones((2,)))
