"""Scans, user combiners, sorting and counting against NumPy."""

import numpy as np
import pytest

import tessera as ts
from conformance.tile.scans.cases import counted, cumulated, interleaved, largest_with_place, narrow_sums, ordered
from conformance.tile.scans.cases import recurrence as recurrence_kernel
from tessera import tile
from tessera.core.errors import ArgumentError, DTypeError, ShapeError


@pytest.mark.parametrize("shape", [(1, 1), (4, 5), (2, 16)])
def test_scans(shape, rng):
    x, out = rng.uniform(0.5, 1.5, shape).astype("f4"), np.zeros((5, *shape), "f4")
    cumulated[(1,)](x, out, M=shape[0], N=shape[1])
    lowest = np.minimum.accumulate(x[:, ::-1], 1)[:, ::-1]
    want = [x.cumsum(1), x.cumsum(0), x.cumprod(1), np.maximum.accumulate(x, 1), lowest]
    np.testing.assert_allclose(out, want, rtol=1e-5)


def test_a_combiner_of_two_blocks(rng):
    decay, x = rng.random((3, 20), "f4"), rng.random((3, 20), "f4")
    out, total, state = np.zeros((3, 20), "f4"), np.zeros(3, "f4"), np.zeros(3)
    recurrence_kernel[(3,)](decay, x, out, total, N=20)
    for n in range(20):
        state = state * decay[:, n] + x[:, n]
        np.testing.assert_allclose(out[:, n], state, rtol=1e-5)
    np.testing.assert_allclose(total, state, rtol=1e-5)


def test_argmax_by_a_combiner(rng):
    x, out = rng.integers(0, 4, (6, 9)).astype("f4"), np.zeros(6, "i8")
    largest_with_place[(1,)](x, out, M=6, N=9)
    assert out.tolist() == x.argmax(1).tolist()


def test_narrow_sums_are_accumulated_wide():
    x, small = np.full(40, 0.1, "f2"), np.full(40, 100, "i1")
    out, counts = np.zeros(40, "f2"), np.zeros(40, "i8")
    narrow_sums[(1,)](x, small, out, counts, N=40)
    assert out[-1] == np.float16(np.float32(x[0]) * 40) and counts[-1] == 4000


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (5, 6)])
def test_order(shape, rng):
    x = rng.integers(-3, 3, shape).astype("f4")
    x[rng.random(shape) < 0.2] = np.nan
    out, places = np.zeros((3, *shape), "f4"), np.zeros(shape, "i8")
    ordered[(1,)](x, out, places, M=shape[0], N=shape[1])
    np.testing.assert_array_equal(out, [np.sort(x, 1), np.sort(x, 0)[::-1], x[:, ::-1]])
    np.testing.assert_array_equal(places, np.argsort(x, 1, kind="stable"))


def test_histogram(rng):
    x, out = rng.integers(-2, 9, (2, 50)).astype("i4"), np.zeros((2, 8), "i8")
    counted[(2,)](x, out, N=50, B=8)
    assert out.tolist() == [np.bincount(row[(row >= 0) & (row < 8)], minlength=8).tolist() for row in x]


def test_join_and_split():
    x, y = np.arange(12, dtype="f4"), -np.arange(12, dtype="f4")
    out, halves = np.zeros(24, "f4"), np.zeros((2, 6), "f4")
    interleaved[(1,)](x, y, out, halves, N=12)
    assert out.tolist() == np.stack([x, y], -1).ravel().tolist() and halves.tolist() == [[*x[::2]], [*x[1::2]]]


@ts.kernel
def unknown_combiner(x, out):
    out[0:4] = tile.scan(tile.load(x[0:4]), "median")


@ts.kernel
def a_scalar(x, out):
    out[0] = tile.cumsum(x[0])


@ts.kernel
def float_counts(x, out):
    out[0:4] = tile.cast(tile.histogram(tile.load(x[0:4]), 4), ts.f32)


@ts.kernel
def one_of_two(x, out):
    pair = (tile.load(x[0:4]), tile.load(x[0:4]))
    out[0:4], _ = tile.scan(pair, lambda a, b, c, d: a + c)


@pytest.mark.parametrize(
    ("entry", "error", "says"),
    [
        (unknown_combiner, ArgumentError, "median"),
        (a_scalar, ShapeError, "one axis"),
        (float_counts, DTypeError, "integers"),
        (one_of_two, ArgumentError, "gives 1 values of 2"),
    ],
)
def test_refusals(entry, error, says):
    with pytest.raises(error, match=says):
        entry[(1,)](np.ones(4, "f4"), np.zeros(4, "f4"))
