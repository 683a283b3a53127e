"""The fused multiply-add against exact rational arithmetic."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera.interp.target.fma as fma_module
from tessera.interp.target.fma import fma, round_to_format


def rounded(exact, dtype):
    """The nearest value of a format, ties to even: found among the neighbours of a first guess."""
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    guess = np.array([abs(float(exact))]).astype(dtype).view(bits)[0]
    near = [n for n in (int(guess) - 1, int(guess), int(guess) + 1) if n >= 0]
    values = {n: np.array([n], bits).view(dtype)[0] for n in near}
    finite = {n: v for n, v in values.items() if np.isfinite(v)}
    return float(min(finite.items(), key=lambda p: (abs(Fraction(float(p[1])) - abs(exact)), p[0] & 1))[1])


def floats(width, limit):
    return st.floats(-limit, limit, width=width, allow_nan=False)


def check(dtype, a, b, c):
    a, b, c = (np.array([x]).astype(dtype) for x in (a, b, c))
    exact = Fraction(float(a[0])) * Fraction(float(b[0])) + Fraction(float(c[0]))
    with np.errstate(all="ignore"):
        got = float(fma(a, b, c)[0])
    assert abs(got) == rounded(exact, dtype)
    assert exact == 0 or np.signbit(got) == (exact < 0)


@settings(max_examples=300, deadline=None)
@given(*[floats(32, 2.0**60)] * 3)
def test_float(a, b, c):
    check(np.float32, a, b, c)


@settings(max_examples=300, deadline=None)
@given(*[floats(64, 2.0**500)] * 3)
def test_double(a, b, c):
    check(np.float64, a, b, c)


@settings(max_examples=200, deadline=None)
@given(*[floats(16, 200)] * 3)
def test_half(a, b, c):
    check(np.float16, a, b, c)


@settings(max_examples=200, deadline=None)
@given(*[floats(16, 2.0**15)] * 3)
def test_bfloat(a, b, c):
    check(ml_dtypes.bfloat16, a, b, c)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 2**24), st.integers(1, 2**24), st.integers(-90, 90), st.sampled_from([1, -1]))
def test_float_near_half_ways(m, n, e, sign):
    check(np.float32, m, n, sign * 2.0**e)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 2**53), st.integers(1, 2**53), st.integers(-300, 300), st.sampled_from([1, -1]))
def test_double_near_half_ways(m, n, e, sign):
    check(np.float64, m, n, sign * 2.0**e)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_subnormal(dtype):
    rng = np.random.default_rng(0)
    tiny = float(np.finfo(dtype).smallest_subnormal)
    root = 2.0 ** (np.log2(tiny) // 2)
    for m, n, k in rng.integers(1, 1000, (200, 3)):
        check(dtype, m / 1024 * root, n * root, k * tiny)


def test_special():
    one, big, inf = (np.array([x]) for x in (1.0, 1e308, np.inf))
    with np.errstate(all="ignore"):
        assert fma(big, big, -inf)[0] == -np.inf
        assert fma(big, -big, one)[0] == -np.inf
        assert np.isnan(fma(inf, one, -inf)[0])
        assert np.signbit(fma(-one, one * 0, -one * 0)[0])
        assert not np.signbit(fma(one, one, -one)[0])
        assert fma(big, one * 10, -big)[0] == np.inf
        assert fma(big, one * 2, -big)[0] == 1e308


def test_zeros_infinities_and_nans_need_no_rational_arithmetic(monkeypatch):
    """Of doubles: what pads a tile is zero. The sum rounds once, since the product is exact."""
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.5, -3.0, 1e308, 5e-324])
    a, b, c = (each.ravel() for each in np.meshgrid(values, values, values))
    exact = (a == 0) | (b == 0) | ~np.isfinite(a) | ~np.isfinite(b)
    with np.errstate(all="ignore"):
        want = np.array([fma_module._fma_exact(*three) for three in zip(a, b, c, strict=True)])
        monkeypatch.setattr(fma_module, "_fma_exact", None)
        found = fma(*(each[exact] for each in (a, b, c)))
    assert exact.sum() > 500
    np.testing.assert_array_equal(found, want[exact])
    numbers = ~np.isnan(found)
    np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(want[exact][numbers]))


def test_narrow_to_bfloat():
    x = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40, 1 + 2.0**-8])
    assert round_to_format(x, np.dtype(ml_dtypes.bfloat16)).tolist() == [1 + 2.0**-7, 1, 1]
