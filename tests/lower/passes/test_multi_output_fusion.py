"""Multi-output fusion: the pointwise kernels of a step are one kernel, in the order that their memory asks for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.lower.lowering_plan import LoweringPlan
from tessera.ops.dialects import host, schedule
from tests.lower.levels import PLANS, agree, modules, traced

rng = np.random.default_rng(7)
A, B = (rng.standard_normal((3, 8)).astype(np.float32) for _ in range(2))
X = rng.standard_normal((4, 3, 8)).astype(np.float32)
PLAN = LoweringPlan(collapse=True)


def scanned(step):
    """A function that scans with a step over two states."""
    return lambda a, b, xs: ts.scan(step, (a, b), xs)


def gates(state, x):
    h, c = state
    c = ts.sigmoid(h[:, ::1] + x) * c + ts.tanh(x)
    h = ts.tanh(c) * x
    return (h, c), h


def swap(state, x):
    return (state[1], state[0]), state[0] + x


def shift(state, x):
    h = ts.roll(state[0], 1, axis=1) + x
    return (h, state[1] + h), h * 2


def turn(state, x):
    return (ts.flip(state[1], axis=0), state[0] * x), state[1]


def total(state, x):
    h = state[0] - ts.sum(state[1], axis=1, keepdims=True)
    return (h, h * x), ts.exp(-h * h)


def halves(state, x):
    return (state[1] + x, ts.concatenate([state[0][:, 4:], state[0][:, :4]], axis=1)), state[0] - state[1]


STEPS = {"gates": gates, "swap": swap, "shift": shift, "turn": turn, "total": total, "halves": halves}


def count_kernels(function, *arrays):
    """The kernels of the bodies of the loops of a function."""
    main = modules(traced(function, *arrays)[0], PLAN)["schedule"].main
    loops = [n for n in main.body.walk() if n.op in (host.loop, host.while_)]
    return [[n for n in loop.regions[-1].nodes if n.op is schedule.kernel] for loop in loops]


@pytest.mark.parametrize("name", STEPS)
def test_steps_keep_their_values(name):
    agree(scanned(STEPS[name]), A, B, X)


@pytest.mark.parametrize(("name", "count"), [("gates", 1), ("swap", 1), ("shift", 2), ("turn", 2), ("total", 3)])
def test_pointwise_kernels_of_a_step_are_one(name, count):
    ((*kernels,),) = count_kernels(scanned(STEPS[name]), A, B, X)
    assert len(kernels) <= count


def test_the_kernel_of_a_step_stores_states_and_results_alone():
    ((kernel,),) = count_kernels(scanned(gates), A, B, X)
    stores = [n for n in kernel.regions[0].nodes if n.op is schedule.store]
    loads = [n for n in kernel.regions[0].nodes if n.op is schedule.load]
    assert len(stores) == 3 and len(loads) == 3
    assert len(set(kernel.args)) == len(kernel.args), "a memory that is read and written is one parameter"


@pytest.mark.parametrize(("states", "most"), [(6, 1), (20, 2)])
def test_a_kernel_takes_at_most_24_memories(states, most):
    """A step that turns the states around reads each, and writes each once more."""
    given = [A + float(i) for i in range(states)]

    def run(*given):
        return ts.scan(lambda state, x: ((*state[1:], state[0] * x), None), given, X)[0]

    ((*kernels,),) = count_kernels(run, *given)
    assert len(kernels) >= most and all(len(set(k.args)) <= 24 for k in kernels)


def test_while_loops_and_branches_are_fused_too():
    def run(a, b):
        def step(state):
            n, h, c = state
            h, c = ts.cond(n > 2, lambda h, c: (h + c, h * c), lambda h, c: (h - c, c), h, c)
            return n + 1, h * 0.5, c + h

        return ts.while_loop(lambda state: state[0] < 5, step, (np.int32(0), a, b))

    agree(run, A, B)


def test_slices_of_one_stack_are_not_taken_for_each_other():
    """What a step stores in a stack, it does not read as another slice of it."""

    def run(a, xs):
        _, ys = ts.scan(lambda h, x: (h + x, h * x), a, xs)
        return ts.scan(lambda h, y: (h - y, h + y), a, ys)

    agree(run, A, X)


OPS = (
    lambda a, b, x: a + b * x, lambda a, b, x: ts.maximum(a, x), lambda a, b, x: ts.flip(a, axis=1) - x,
    lambda a, b, x: b, lambda a, b, x: ts.tanh(a - b), lambda a, b, x: ts.permute(a, (1, 0)).reshape(3, 8) + b,
    lambda a, b, x: x * ts.max(b, axis=0, keepdims=True), lambda a, b, x: ts.roll(b, 3, axis=1),
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, len(OPS) - 1), min_size=3, max_size=5), st.sampled_from(sorted(PLANS)))
def test_any_step_keeps_its_values(chosen, plan):
    def step(state, x):
        values = list(state)
        for number in chosen:
            values.append(OPS[number](values[-1], values[-2], x))
        return (values[-1], values[-2]), values[-3] + 1

    agree(scanned(step), A, B, X, plans={plan: PLANS[plan]})
