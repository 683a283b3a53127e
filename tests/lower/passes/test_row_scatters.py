"""Scatters of few elements into each row of what is computed are selections: nothing is sorted."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.codegen.ptx.generator import PLAN
from tessera.errors import OutOfBoundsError
from tessera.ir.core import Module
from tessera.lower.pipeline import lower
from tessera.ops.tensor import scatter
from tessera.ops.tensor.shape import check_index

SHAPE = (3, 40, 5)
DTYPES = {"f8": 1e-12, "f4": 1e-6, "f2": 2e-3, ml_dtypes.bfloat16: 2e-2, "i4": 0}


def draw(axis, count, seed=0):
    random = np.random.default_rng(seed)
    sizes = [count if a == axis else n for a, n in enumerate(SHAPE)]
    return random.integers(-SHAPE[axis], SHAPE[axis], sizes)


def flatten(places, axis):
    """Flat indices as a sum over the axes, as those of `take_along_axis` are."""
    places = places % SHAPE[axis]
    at = [places if a == axis else np.arange(n).reshape([-1 if b == a else 1 for b in range(3)])
          for a, n in enumerate(SHAPE)]  # fmt: skip
    return np.broadcast_arrays(*at)


def differentiate(places, axis):
    def gradient(x, weights):
        return ts.grad(lambda v: ts.sum(ts.take_along_axis(v * v, places, axis=axis) * weights))(x)

    return gradient


def has_scatter(function, *arrays):
    """Whether a function of these arrays has a scatter after the pass."""
    modules = lower(Module("graph", (ts.jit(function).trace(*arrays).function,)), PLAN)
    module = next(module for name, module in modules if name == "row scatters")
    return any(n.op in (scatter.scatter, scatter.scatter_add) for n in module.main.body.walk())


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_gradient_of_few_elements_of_each_row(axis, count):
    places = draw(axis, count)
    random = np.random.default_rng(1)
    x, weights = random.standard_normal(SHAPE), random.standard_normal(places.shape)
    want = np.zeros(SHAPE)
    np.add.at(want, tuple(flatten(places, axis)), weights)
    gradient = differentiate(places, axis)
    assert not has_scatter(gradient, x, weights)
    for target in ("interp", "llvm"):
        got = ts.jit(gradient, target=target)(x, weights)
        np.testing.assert_allclose(np.asarray(got), want * 2 * x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_type(dtype):
    places, random = draw(1, 3), np.random.default_rng(2)
    part = (random.standard_normal(places.shape) * 9).astype(dtype)
    base = (random.standard_normal(SHAPE) * 9).astype(dtype)
    at = np.ravel_multi_index(flatten(places, 1), SHAPE)

    def add(x, part, places):
        count = ts.iota(shape=(3, 3, 5), axis=0) * 200 + ts.iota(shape=(3, 3, 5), axis=2)
        flat = count + check_index(places, size=40, along=1) * 5
        return ts.scatter_add(ts.reshape(-x, (-1,)), ts.reshape(flat, (-1,)), ts.reshape(part, (-1,)), axis=0)

    want = -base.reshape(-1).astype("f8")
    np.add.at(want, at.reshape(-1), part.reshape(-1).astype("f8"))
    got = np.asarray(ts.jit(add, target="llvm")(base, part, places)).astype("f8")
    assert not has_scatter(add, base, part, places)
    np.testing.assert_allclose(got, want, rtol=DTYPES[dtype], atol=DTYPES[dtype] * 30)


def test_the_last_of_equal_places_wins():
    places = np.array([[3, 3, 1], [0, 2, 0]])

    def put(x, places, part):
        flat = ts.iota(shape=(2, 3), axis=0) * 5 + check_index(places, size=5, along=1)
        return ts.scatter(ts.reshape(x * 2, (-1,)), ts.reshape(flat, (-1,)), ts.reshape(part, (-1,)), axis=0)

    x, part = np.arange(10.0).reshape(2, 5), np.array([[10.0, 20.0, 30.0], [40.0, 50.0, 60.0]])
    want = [0, 30, 4, 20, 8, 60, 12, 50, 16, 18]
    assert not has_scatter(put, x, places, part)
    for target in ("interp", "llvm"):
        assert np.asarray(ts.jit(put, target=target)(x, places, part)).tolist() == want


def test_zeros_keep_their_signs():
    """What has no update, or one of zero, stays as it is."""
    places = np.array([[1], [1]])

    def add(x, part):
        return ts.grad(lambda v: ts.sum(ts.take_along_axis(v, places, axis=1) * part))(x)

    x, part = np.ones((2, 3)), np.array([[-0.0], [np.inf]])
    for target in ("interp", "llvm"):
        got = np.asarray(ts.jit(add, target=target)(x, part))
        assert not np.signbit(got).any()
        assert got.tolist() == [[0, 0, 0], [0, np.inf, 0]]


def test_an_index_outside_is_an_error():
    places = np.array([[1], [40]])
    gradient = differentiate(places, 1)
    for target in ("interp", "llvm"):
        with pytest.raises(OutOfBoundsError):
            ts.jit(gradient, target=target)(np.ones((2, 40)), np.ones((2, 1)))


@pytest.mark.parametrize("case", ["many updates", "an argument", "rows of other indices"])
def test_what_stays_a_scatter(case):
    random = np.random.default_rng(3)
    if case == "many updates":
        gradient, arrays = differentiate(draw(1, 5), 1), (random.standard_normal(SHAPE), np.ones((3, 5, 5)))
    elif case == "an argument":  # its other elements need not be written

        def gradient(x, places, part):
            flat = ts.iota(shape=(64, 1), axis=0) * 5 + check_index(places, size=5, along=1)
            return ts.scatter_add(x, ts.reshape(flat, (-1,)), part, axis=0)

        arrays = np.ones(320), np.ones((64, 1), int), np.ones(64)
    else:

        def gradient(x, places, part):
            return ts.scatter_add(x * 2, places, part, axis=0)

        arrays = np.ones(64 * 40), np.arange(64) * 40, np.ones(64)
    assert has_scatter(gradient, *arrays)
