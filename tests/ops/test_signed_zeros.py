"""Of two zeros -0 is the smaller, in reductions and scatters too, at every level and in the text of two targets."""

import itertools

import numpy as np
import pytest

import tessera as ts
from conformance.run import list_engines
from tessera.frontend.jit.tracing import Jit
from tessera.runtime.program import prepare

ENGINES = list_engines(["llvm", "ptx"], ["graph", "schedule", "tile", "target"])
# All rows of three values of which the extreme is a zero.
ROWS = np.array([*itertools.product((-0.0, 0.0), repeat=3), (0.0, -1.0, -0.0), (-0.0, -2.0, -0.0)])
FUNCTIONS = {
    "max": lambda x: ts.max(x, axis=-1),
    "min": lambda x: ts.min(abs_of_negative(x), axis=-1),
    "max-rows": lambda x: ts.max(ts.transpose(x, 0, 1), axis=0),
    "scatter-max": lambda x: ts.scatter(x[:, :1], np.array([0, 0]), x[:, 1:], axis=1, mode="max")[:, 0],
    "scatter-min": lambda x: ts.scatter(abs_of_negative(x)[:, :1], np.array([0, -1]), abs_of_negative(x)[:, 1:], axis=1,
                                        mode="min")[:, 0],
}  # fmt: skip


def abs_of_negative(x):
    """Numbers other than zeros made positive."""
    return ts.where(x < 0.0, -x, x)


def has_negative_zero(name, row):
    """IEEE 754-2019, maximum and minimum: the extreme zero is -0 if all zeros are, or if any is."""
    negative = [np.signbit(v) for v in row if v == 0]
    return all(negative) if "max" in name else any(negative)


@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_extreme_zero(name, dtype):
    program = prepare(Jit(FUNCTIONS[name]), (ROWS.astype(dtype),))
    for engine in ENGINES:
        (found,) = engine.run(program)
        assert not found.any()
        assert [bool(s) for s in np.signbit(found)] == [has_negative_zero(name, row) for row in ROWS], engine.name


@pytest.mark.parametrize("mode", ["min", "max"])
def test_zeros_that_meet_in_a_scatter(mode):
    x, places = np.float32([0.0, -0.0, 0.0, -0.0, np.nan]), np.array([0, 1, 2, 3, 3])
    new = np.float32([-0.0, 0.0, 0.0, -0.0, -0.0])
    program = prepare(Jit(lambda x, i, u: ts.scatter(x, i, u, mode=mode)), (x, places, new))
    for engine in ENGINES:
        (found,) = engine.run(program)
        assert list(np.signbit(found[:4])) == ([1, 1, 0, 1] if mode == "min" else [0, 0, 0, 1]), engine.name
        assert np.isnan(found[4])
