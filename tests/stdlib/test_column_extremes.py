"""Column extremes: argmin and argmax along outer axes against NumPy, with ties, NaN and parts of the axis."""

import numpy as np
import pytest

import tessera as ts
from tessera.stdlib import column_extremes

SHAPES = {"middle": ((5, 67, 37), 1), "first": ((700, 7), 0), "before the last": ((2, 5, 300, 3), 2)}


@pytest.mark.in_turn("op")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["f4", "f2", "i4", "i8", "u1"])
@pytest.mark.parametrize("op", ["argmin", "argmax"])
def test_places_are_those_of_numpy(name, dtype, op):
    sizes, axis = SHAPES[name]
    random = np.random.default_rng(len(sizes))
    x = (random.standard_normal(sizes) * 9 + 20).astype(dtype)  # integers have ties
    if x.dtype.kind == "f":
        x.reshape(-1)[random.integers(0, x.size, 5)] = [np.nan, np.inf, -np.inf, np.nan, np.nan]
    got = ts.jit(lambda x: getattr(ts, op)(x, axis=axis), target="ptx")(x).numpy()
    np.testing.assert_array_equal(got, getattr(np, op)(x, axis=axis))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_the_first_of_equal_elements_counts(value, monkeypatch):
    monkeypatch.setattr(column_extremes, "BLOCK", 64)  # several parts
    x = np.full((500, 6), value, np.float32)
    for op in (ts.argmin, ts.argmax):
        assert not ts.jit(lambda x, op=op: op(x, axis=0), target="ptx")(x).numpy().any()
    x[:, 2], x[77, 2] = 1, np.nan
    assert ts.jit(lambda x: ts.argmax(x, axis=0), target="ptx")(x).numpy()[2] == 77


@pytest.mark.parametrize(
    ("function", "shape", "axis"),
    [
        (lambda x: ts.argmax(x, axis=0), (3, 5), 0),
        (lambda x: ts.argmax(x, axis=1), (3, 5), None),  # adjacent elements
        (lambda x: ts.argmax(x, axis=0), (3, 0), None),
        (lambda x: ts.argmax(x.to(ts.bf16 @ ts.toward_zero), axis=0), (3, 5), None),
    ],
)
def test_which_places_are_found_by_columns(function, shape, axis):
    nodes = ts.jit(function).trace(np.zeros(shape, np.float32)).function.body.nodes
    assert [column_extremes.find_outer_axis(n) for n in nodes if n.op.name == "ts.argmax"] == [axis]
