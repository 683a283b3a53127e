"""Multi-output fusion outside loops: which pointwise kernels are one, and that order and memory are kept."""

import numpy as np
import pytest

import tessera as ts
from tessera.lower.lowering_plan import LoweringPlan
from tessera.ops.dialects import schedule
from tests.lower.levels import agree, modules, traced

X, Y, G = (np.random.default_rng(i).standard_normal((6, 8)).astype("f4") for i in range(3))
PLAN = LoweringPlan(collapse=True)


def step(p, m, g):
    m = m * 0.9 + g
    return p - m * 0.1, m


def among_many(x, y, g):
    """Kernels of thirteen memories together."""
    first = [x * float(n) for n in range(6)]
    return *first, *(x + y * g * float(n) for n in range(5))


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
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_that_share_memory_are_one(name):
    function, count = PROGRAMS[name]
    agree(function, X, Y, G)
    main = modules(traced(function, X, Y, G)[0], PLAN)["schedule"].main
    assert sum(n.op is schedule.kernel for n in main.body.nodes) == count


def test_a_kernel_takes_as_many_memories_as_registers_hold():
    agree(among_many, X, Y, G)
    main = modules(traced(among_many, X, Y, G)[0], PLAN)["schedule"].main
    kernels = [n for n in main.body.nodes if n.op is schedule.kernel]
    assert len(kernels) > 1 and max(len(set(n.args)) for n in kernels) <= 12


def test_what_only_the_kernel_reads_is_not_stored():
    def chain(x, y, g):
        u = ts.tanh(x)
        return u * y, ts.flip(ts.exp(u * g), 0), u + g

    agree(chain, X, Y, G)
