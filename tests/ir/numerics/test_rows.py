"""Reductions of short rows give the values of NumPy's own reductions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tessera.ir.numerics import reference_kernels

SHAPES = arrays.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=20)
FLOATS = st.floats(-1e3, 1e3, width=32) | st.sampled_from([np.nan, np.inf, -np.inf, -0.0])


@given(arrays.arrays(np.float32, SHAPES, elements=FLOATS), st.booleans(), st.randoms())
def test_extremes_are_numpys(x, keepdims, random):
    x = x.transpose(random.sample(range(x.ndim), x.ndim))
    for ufunc in (np.maximum, np.minimum):
        np.testing.assert_array_equal(
            reference_kernels.reduce_extreme(ufunc, x, (-1,), keepdims), ufunc.reduce(x, axis=-1, keepdims=keepdims)
        )


@pytest.mark.parametrize("shape", [(100, 7), (3, 40, 128), (2, 129), (1, 5), (4, 0), (0, 4)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_sums_are_as_near_as_numpys(shape, keepdims):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found, wide = reference_kernels.sum_rows(x, (-1,), keepdims), x.astype(np.float64)
    assert found.dtype == np.float32
    error = np.abs(found - wide.sum(-1, keepdims=keepdims))
    assert (error <= 8 * np.finfo(np.float32).eps * np.abs(wide).sum(-1, keepdims=keepdims)).all()


def test_other_axes_and_types_are_left_to_numpy():
    x = np.arange(24.0).reshape(2, 3, 4)
    assert reference_kernels.sum_rows(x, None, False) == x.sum()
    np.testing.assert_array_equal(
        reference_kernels.reduce_extreme(np.maximum, x.astype(np.int64), (-2,), False), x.max(-2)
    )


def test_a_row_has_one_sum_whatever_is_beside_it():
    x = np.random.default_rng(0).standard_normal((30, 77)).astype(np.float32)
    alone = np.concatenate([reference_kernels.sum_rows(row[None, :50], (-1,), False) for row in x])
    np.testing.assert_array_equal(reference_kernels.sum_rows(x[:, :50], (-1,), False), alone)
