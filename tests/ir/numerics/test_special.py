"""The error function against that of the standard library."""

import math

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tessera.ir.numerics.reference_kernels import compute_erf


def off_in_ulps(x):
    want = np.array([math.erf(v) for v in x.ravel()]).reshape(x.shape)
    return np.max(np.abs(compute_erf(x) - want) / np.spacing(np.abs(want)))


def test_erf_is_within_two_ulps_everywhere():
    assert off_in_ulps(np.linspace(-7, 7, 20001)) <= 2
    assert off_in_ulps(np.concatenate([s * 10.0 ** np.linspace(-300, 1, 3000) for s in (1, -1)])) <= 2


@settings(max_examples=100, deadline=None)
@example(1.79e308)
@given(st.floats(allow_nan=False))
def test_erf_is_odd_and_within_one(x):
    assert compute_erf(np.float64(x)) == -compute_erf(np.float64(-x)) and abs(compute_erf(np.float64(x))) <= 1


def test_erf_of_special_values_and_its_dtype():
    assert compute_erf(np.float64([np.inf, -np.inf])).tolist() == [1, -1] and np.isnan(compute_erf(np.float64(np.nan)))
    assert compute_erf(np.float32(0.5)).dtype == np.float32 and math.copysign(1, compute_erf(np.float64(-0.0))) == -1
    assert compute_erf(np.zeros((2, 0))).shape == (2, 0)
