"""Concatenations of many parts are trees: no kernel holds hundreds of blocks in registers."""

import numpy as np
import pytest

import tessera as ts
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.passes.canonicalisation import MAX_PARTS
from tessera.ops.dialects import schedule
from tests.lower.levels import PLANS, agree, modules, traced

X = np.random.default_rng(3).standard_normal((70, 2, 3)).astype(np.float32)


def unrolled(count, axis):
    """What an unrolled loop of so many steps stacks."""

    def run(x):
        h, found = x[0], []
        for i in range(count):
            h = ts.tanh(h + x[i])
            found.append(h)
        return ts.stack(found, axis=axis)

    return run


def most_loads(function, *arrays):
    """The most loads of a kernel."""
    main = modules(traced(function, *arrays)[0], LoweringPlan())["schedule"].main
    kernels = [n for n in main.body.walk() if n.op is schedule.kernel]
    return max(sum(n.op is schedule.load for n in k.regions[0].nodes) for k in kernels)


@pytest.mark.parametrize(("count", "axis", "plans"), [
    (MAX_PARTS + 1, 0, PLANS), (2 * MAX_PARTS + 1, 1, ["default", "small", "reshaped"]), (70, 2, ["own rows"]),
])  # fmt: skip
def test_unrolled_loops_stack_their_steps(count, axis, plans):
    agree(unrolled(count, axis), X, plans={name: PLANS[name] for name in plans})


@pytest.mark.parametrize("count", [16, 17, 70])
def test_no_kernel_reads_more_parts_than_it_may_hold(count):
    assert most_loads(unrolled(count, 0), X) <= 2 * MAX_PARTS + 2


def test_parts_of_different_lengths_keep_their_order():
    def run(x):
        return ts.concatenate([ts.exp(x[i : i + 1 + i % 3]) for i in range(40)], axis=0)

    agree(run, X, plans={name: PLANS[name] for name in ("default", "small own rows", "reshaped")})
