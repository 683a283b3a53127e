"""Random numbers before reductions: they are held in memory, and the numbers stay."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.ptx.generator import PLAN
from tessera.core.types import bool_
from tessera.interp.tile import interpreter
from tests.lower.levels import modules, traced

X = np.random.default_rng(0).standard_normal((6, 40)).astype("f4")


def find_launches(function, *args):
    """The types of the operands of each launch for a GPU."""
    module = modules(traced(function, *args)[0], PLAN)["tile"]
    return [[v.type for v in n.args] for n in module.main.body.nodes if n.op.name == "host.launch"]


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda x: ts.layer_norm(x + ts.dropout(x, 0.5), (40,)), True),
        (lambda x: ts.sum(ts.dropout(x, 0.5), axis=0), True),
        (lambda x: ts.exp(ts.dropout(x, 0.5)), False),  # a pointwise kernel computes them itself
        (lambda x: ts.sum(x * ts.arange(40).to(ts.f32), axis=1), False),  # few ops
    ],
)
def test_what_is_held(function, held):
    launches = find_launches(function, X)
    assert (len(launches) == 2 and any(t.dtype == bool_ for t in launches[1])) == held
    assert held or len(launches) == 1


def test_numbers_that_are_a_factor_are_held():
    launches = find_launches(lambda x: ts.softmax(x + ts.rand((6, 40)), axis=1), X)
    assert [len([t for t in each if t.shape]) for each in launches] == [1, 3]


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda x: x + ts.rand((3, 7)), False),  # f32 is as much memory as words are work
        (lambda x: ts.dropout(x, 0.5), True),
        (lambda x: ts.where(ts.rand((3, 7)) * 2.0 - 1.0 < 0.25, x, 0.0), True),
        (lambda x: ts.layer_norm(x + ts.dropout(x, 0.5), (7,)), True),
        (lambda x: x * ts.dropout(ts.ones((3, 1)), 0.5), False),  # no bools
    ],
)
def test_parts_of_blocks(function, held):
    """21 elements are no whole blocks of four words: bools of whole ones are held."""
    x = X[:3, :7]
    launches = find_launches(function, x)
    assert len(launches) == 1 + held and not held or launches[0][-1].shape[-1] == 4
    traced_function, args = traced(function, x)
    (got,) = interpreter.run(modules(traced_function, PLAN)["tile"], [*args, np.array(5), np.array(9)])
    ts.manual_seed(5)
    ts.rand(36)
    np.testing.assert_allclose(got, function(ts.Tensor(x)).numpy(), rtol=1e-4, atol=1e-5)


def test_what_is_repeated_is_held_once():
    x = np.ones((6, 40, 8), "f4")
    first, second = find_launches(lambda x: ts.sum(x * ts.dropout(ts.ones((6, 40, 1)), 0.5), axis=1), x)
    assert max(np.prod(t.shape) for t in first) == 240 and len(second) == 3


@pytest.mark.parametrize("axis", [0, 1])
def test_the_numbers_stay(axis):
    def program(x):
        return ts.sum(ts.dropout(x, 0.25) + ts.rand((6, 40)), axis=axis)

    function, args = traced(program, X)
    (got,) = interpreter.run(modules(function, PLAN)["tile"], [*args, np.array(7), np.array(0)])
    ts.manual_seed(7)
    np.testing.assert_allclose(got, program(ts.Tensor(X)).numpy(), rtol=1e-5, atol=1e-5)


def test_control_flow_reads_places():
    """A loop has several results, and a user of values may have none."""

    def program(x):
        return ts.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s // 2 + ts.arange(6)), (0, x))

    x = np.arange(6)
    function, args = traced(program, x)
    for got, want in zip(interpreter.run(modules(function, PLAN)["tile"], args), program(ts.Tensor(x)), strict=True):
        np.testing.assert_array_equal(got, want.numpy())


def test_random_numbers_for_a_loop():
    def program(x):
        drawn = ts.rand((6,))
        return ts.sum(ts.fori_loop(0, 2, lambda i, s: s + drawn, x) + drawn)

    x = np.ones(6, "f4")
    function, args = traced(program, x)
    (got,) = interpreter.run(modules(function, PLAN)["tile"], [*args, np.array(3), np.array(0)])
    ts.manual_seed(3)
    np.testing.assert_allclose(got, program(ts.Tensor(x)).numpy(), rtol=1e-5)
