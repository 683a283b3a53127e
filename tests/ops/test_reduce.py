"""Reductions against plain Python over lists."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.core.errors import ShapeError
from tessera.core.types import Policy, accum, bf16, bool_, f16, f32, f64, int8, int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import reduce

ROWS = [[1.0, 4.0, -2.0], [0.5, 4.0, 8.0]]
X = Tensor(ROWS)

BY_ROW = {
    reduce.sum: math.fsum,
    reduce.max: max,
    reduce.min: min,
    reduce.mean: statistics.fmean,
    reduce.var: statistics.pvariance,
    reduce.argmax: lambda r: r.index(max(r)),
    reduce.argmin: lambda r: r.index(min(r)),
}


@pytest.mark.parametrize("op", BY_ROW, ids=lambda o: o.__name__)
def test_each_axis(op):
    np.testing.assert_allclose(op(X, axis=-1).numpy(), [BY_ROW[op](r) for r in ROWS], rtol=1e-6)
    columns = [list(c) for c in zip(*ROWS, strict=True)]
    np.testing.assert_allclose(op(X, axis=0).numpy(), [BY_ROW[op](c) for c in columns], rtol=1e-6)
    assert op(X, axis=0, keepdims=True).shape == op(X, dim=0, keepdim=True).shape == (1, 3)


@pytest.mark.parametrize("op", list(BY_ROW)[:5], ids=lambda o: o.__name__)
def test_all_axes(op):
    every = ROWS[0] + ROWS[1]
    for out in (op(X), op(X, axis=None), op(X, axis=(0, 1)), op(X, axis=[-1, 0])):
        np.testing.assert_allclose(out.numpy(), BY_ROW[op](every), rtol=1e-6)
    assert op(X, keepdims=True).shape == (1, 1)


def test_scalars():
    x = Tensor(3.0)
    assert reduce.sum(x).numpy() == 3 and reduce.max(x).numpy() == 3 and reduce.mean(x).numpy() == 3
    assert reduce.argmax(x).numpy() == 0 and reduce.argmin(x, axis=-1).numpy() == 0
    with pytest.raises(ShapeError, match="no axis: the tensor is a scalar"):
        reduce.argmax(x, axis=1)


def test_integers():
    x = Tensor([100, 100, 100], int8)
    assert reduce.sum(x).numpy() == 300 and reduce.sum(x).dtype == int64
    assert reduce.mean(x).dtype == f32 and reduce.mean(x).numpy() == 100 and reduce.max(x).dtype == int8
    assert reduce.sum(Tensor(np.array([True, True]))).numpy() == 2
    assert reduce.mean(Tensor([2**62, 2**62])).numpy() == 2.0**62


def test_narrow_floats_accumulate_in_f32():
    ones = np.ones(4096)
    for dtype in (bf16, f16):
        assert reduce.sum(Tensor(ones, dtype)).numpy() == 4096
    # 2048 + 1 is 2048 in f16: an f16 accumulator stays there, in NumPy's pairwise order or not.
    assert reduce.sum(Tensor(ones, Policy(f16) @ accum(f16))).dtype == f16
    assert reduce.mean(Tensor([60000.0] * 4, f16)).numpy() == 60000


def test_empty():
    empty = Tensor(np.zeros((0, 3), np.float32))
    assert reduce.sum(empty, axis=0).numpy().tolist() == [0, 0, 0]
    for op in (reduce.max, reduce.min, reduce.mean):
        with pytest.raises(ShapeError) as caught:
            op(empty, axis=0)
        caught.value.location = None
        assert str(caught.value) == "ShapeError: reducing axis -2 of size 0 has no value\n  received: 0x3xf32"
    assert reduce.max(empty, axis=1).shape == (0,)
    with pytest.raises(ShapeError):
        reduce.argmax(empty, axis=0)


def test_nan_wins():
    x = Tensor([1.0, np.nan, 3.0, np.nan])
    assert np.isnan(reduce.max(x).numpy()) and np.isnan(reduce.min(x).numpy()) and np.isnan(reduce.sum(x).numpy())
    assert reduce.argmax(x).numpy() == 1 and reduce.argmin(x).numpy() == 1


def test_the_first_of_equals_wins():
    assert reduce.argmax(Tensor([1.0, 5.0, 5.0])).numpy() == 1 and reduce.argmin(Tensor([2, 1, 1])).numpy() == 1


def test_axes_out_of_range_and_named_twice():
    with pytest.raises(ShapeError, match="axis 2 is out of range for a tensor of rank 2"):
        reduce.sum(X, axis=2)
    with pytest.raises(ShapeError, match="an axis is named twice"):
        reduce.sum(X, axis=(0, -2))


def test_bools():
    assert reduce.max(Tensor(np.array([False, True]))).dtype == bool_
    assert reduce.mean(Tensor(np.array([True]))).dtype == f32


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=3, max_size=8), st.sampled_from([0, 1]))
def test_variance(row, correction):
    want = (statistics.variance if correction else statistics.pvariance)(row)
    assert math.isclose(reduce.var(Tensor(row, f64), correction=correction).numpy(), want, rel_tol=1e-9, abs_tol=1e-9)


def test_products_of_int4_are_not_cut_off():
    x = ts.tensor([[3, -4, 6], [7, 7, 7]]).to(ts.int4)
    for target in ("interp", "llvm", "ptx"):
        assert ts.jit(lambda x: ts.prod(x, axis=1), target=target)(x).tolist() == [-72, 343]
    assert ts.prod(x).item() == -72 * 343
