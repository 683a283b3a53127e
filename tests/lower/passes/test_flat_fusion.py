"""Multi-output fusion outside loops: which pointwise kernels are one, and that order and memory are kept."""

from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from tessera.core.types import RefType, int64, scalar
from tessera.ir.core import Attrs, Module, Node, Value
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.passes import multi_output_fusion
from tessera.lower.passes.multi_output_fusion import fuse_multi_output
from tessera.lower.pipeline import lower
from tessera.ops.dialects import host, schedule
from tests.lower.levels import agree, modules, traced

X, Y, G = (np.random.default_rng(i).standard_normal((6, 8)).astype("f4") for i in range(3))
PLAN = LoweringPlan(collapse=True)


def step(p, m, g):
    m = m * 0.9 + g
    return p - m * 0.1, m


def among_many(x, y, g):
    """Kernels of fourteen memories together."""
    return tuple(x + y * (n + 2.0) for n in range(12))


def around_a_sort(x, y, g):
    u = x * 2.0
    m = ts.sort(u, axis=1)
    return u, m, ts.exp(m) + x


PROGRAMS = {  # and how many kernels are left
    "a step of an optimizer": (step, 1),
    "the same operand": (lambda x, y, g: (x + 1.0, x * y, x - g), 1),
    "as another shape": (lambda x, y, g: (x + 1.0, ts.reshape(x, (48,)) * 2.0, ts.reshape(x, (2, 24)) - 3.0), 1),
    "nothing shared": (lambda x, y, g: (x + 1.0, y * 2.0), 2),
    "other elements": (lambda x, y, g: (x + 1.0, ts.flip(x, 0) * y), 2),
    "rows of it": (lambda x, y, g: (x + 1.0, x[:3] * 2.0), 2),
    "the transposed one": (lambda x, y, g: (x + y, x.T * 2.0), 2),
    "beside a sort": (around_a_sort, 3),  # whose result another kernel reads where it is stored
    "a policy": (
        lambda x, y, g: (ts.cast(x, ts.bf16 @ ts.toward_zero) * 2.0, ts.cast(x, ts.bf16 @ ts.toward_zero) + 1.0),
        2,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_that_share_memory_are_one(name, monkeypatch):
    monkeypatch.setattr(multi_output_fusion, "SMALL_POINTWISE", 0)
    function, count = PROGRAMS[name]
    agree(function, X, Y, G)
    main = modules(traced(function, X, Y, G)[0], PLAN)["schedule"].main
    assert sum(n.op is schedule.kernel for n in main.body.nodes) == count


def test_small_kernels_of_the_same_dims_are_one(monkeypatch):
    """A launch takes longer than their elements; not those of other dims, or of more elements."""
    function = lambda x, y, g: (x + 1.0, ts.flip(y, 0) * 2.0, g[:2] * 3.0)  # noqa: E731
    agree(function, X, Y, G)
    for most, count in ((X.size, 2), (X.size - 1, 3)):
        monkeypatch.setattr(multi_output_fusion, "SMALL_POINTWISE", most)
        main = modules(traced(function, X, Y, G)[0], PLAN)["schedule"].main
        assert sum(n.op is schedule.kernel for n in main.body.nodes) == count


def test_a_kernel_takes_as_many_memories_as_registers_hold():
    agree(among_many, X, Y, G)
    main = modules(traced(among_many, X, Y, G)[0], PLAN)["schedule"].main
    kernels = [n for n in main.body.nodes if n.op is schedule.kernel]
    assert [len(set(n.args)) for n in kernels] == [12, 4]


def test_what_only_the_kernel_reads_is_not_stored():
    def chain(x, y, g):
        u = ts.tanh(x)
        return u * y, ts.flip(ts.exp(u * g), 0), u + g

    agree(chain, X, Y, G)


def count_fused(function, exchanged, *views):
    """The kernels that are left of a function of three tensors, where `exchanged` names other memories of its kernels:
    (kernel, argument) -> a value or (kernel, argument)."""
    passes = lower(Module("graph", (traced(function, X, Y, G)[0],)), PLAN)
    module = next(made for name, made in passes if name == "schedule")
    kernels = [n for n in module.main.body.nodes if n.op is schedule.kernel]
    args = [list(n.args) for n in kernels]
    for (kernel, place), memory in exchanged.items():
        args[kernel][place] = args[memory[0]][memory[1]] if isinstance(memory, tuple) else memory
    changed = {n: replace(n, args=tuple(each)) for n, each in zip(kernels, args, strict=True)}
    body = replace(module.main.body, nodes=(*views, *(changed.get(n, n) for n in module.main.body.nodes)))
    fused = fuse_multi_output(module.replace(replace(module.main, body=body)), PLAN)
    return sum(n.op is schedule.kernel for n in fused.main.body.nodes)


@pytest.mark.parametrize(("exchanged", "count"), [({}, 2), ({(2, -1): (1, 0)}, 3)])
def test_a_kernel_does_not_store_before_another_one_what_that_reads(exchanged, count):
    """The last kernel, which may join the first, writes what the second reads."""
    assert count_fused(lambda x, y, g: (x * 2.0, y[:3] - 1.0, x + g), exchanged) == count


@pytest.mark.parametrize("slices", [1, 2])
def test_slices_of_one_storage_may_be_the_same(slices):
    """The first kernel writes one, the second reads one."""
    stack, types = Value(RefType((5, *X.shape), ts.f32)), (RefType(X.shape, ts.f32),)
    made = [
        Node(host.at, (stack, Value(scalar(int64))), Attrs({}), tuple(map(Value, types)), (), None)
        for _ in range(slices)
    ]
    exchanged = {(0, -1): made[0].out, (1, 0): made[-1].out}
    assert count_fused(lambda x, y, g: (x + 1.0, y * 2.0 + x), exchanged, *made) == slices
