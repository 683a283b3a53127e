"""Fused multiply-add: a * b + c with one rounding, on NumPy arrays of any float format (Boldo and Melquiond 2008)."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np

_BFLOAT = np.dtype(ml_dtypes.bfloat16)
_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_TINY = np.array(float(np.finfo(np.float32).tiny))
# The 29 bits that a double has beyond a float, and their midpoint; as arrays, which NumPy need not convert at each use.
_BELOW_FLOAT, _MIDPOINT = np.array((1 << 29) - 1), np.array(1 << 28)
_SPLIT = float(2**27 + 1)
# For operands between these magnitudes no step of the double algorithm overflows or underflows.
_SMALL, _LARGE = 2.0**-400, 2.0**400


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded once."""
    if a.dtype == _F64:
        return _fma_double(a, b, c)
    # The product of two formats of at most 24 bits is exact in a double.
    product, addend = a.astype(_F64) * b.astype(_F64), c.astype(_F64)
    total = product + addend
    if a.dtype != _F32 or _may_round_twice(total):
        total = round_to_odd(total, _compute_sum_error(product, addend, total))
    return round_to_format(total, a.dtype)


def round_to_format(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A double rounded once to a narrower format."""
    if dtype != _BFLOAT:
        return x.astype(dtype)
    single = x.astype(_F32)
    # bfloat16 is converted from float: round that to odd first, so that the second rounding is correct.
    odd = round_to_odd(single, (x - single.astype(_F64)).astype(_F64))
    return odd.astype(_BFLOAT)


def _may_round_twice(total: np.ndarray) -> bool:
    """Whether a double is midway between two floats, or rounds to a subnormal, where the midpoints differ."""
    # Most arrays are small here: of NumPy's ways to say whether any element is true, `count_nonzero` is the fastest.
    if np.count_nonzero((total.view(np.int64) & _BELOW_FLOAT) == _MIDPOINT):
        return True
    magnitude = np.abs(total)
    near_zero = magnitude < _TINY
    # Most arrays have neither zeros nor subnormals.
    return bool(np.count_nonzero(near_zero) and np.count_nonzero(near_zero & (magnitude > 0)))


def _compute_sum_error(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """The rounding error of a + b, exactly (Knuth's TwoSum)."""
    part = total - a
    return (a - (total - part)) + (b - part)


def round_to_odd(total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """An inexact result moved to the neighbour with an odd last bit, so that rounding it again is correct."""
    if not np.count_nonzero(error):  # sums of products of 16-bit floats are seldom inexact in a double
        return total
    bits = total.view(np.int64 if total.dtype == _F64 else np.int32)
    inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    toward = np.where(error > 0, np.inf, -np.inf).astype(total.dtype)
    return np.where(inexact, np.nextafter(total, toward), total)


def _compute_product_error(a: np.ndarray, b: np.ndarray, product: np.ndarray) -> np.ndarray:
    """The rounding error of a * b, exactly (Dekker's TwoProduct)."""
    a_high, b_high = a * _SPLIT, b * _SPLIT
    a_high, b_high = a_high - (a_high - a), b_high - (b_high - b)
    a_low, b_low = a - a_high, b - b_high
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _fma_double(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Boldo and Melquiond: the sum of three parts, of which the small ones are rounded to odd."""
    a, b, c = np.broadcast_arrays(a, b, c)
    high = a * b
    low = _compute_product_error(a, b, high)
    middle = c + low
    middle_low = _compute_sum_error(c, low, middle)
    top = high + middle
    top_low = _compute_sum_error(high, middle, top)
    rest = top_low + middle_low
    out = top + round_to_odd(rest, _compute_sum_error(top_low, middle_low, rest))
    # A product that is zero, infinite or NaN is exact: zeros are common, as in what pads a tile.
    exact = (a == 0) | (b == 0) | ~(np.isfinite(a) & np.isfinite(b))
    out = np.where(exact, high + c, out)
    hard = ~(exact | (_is_moderate(a) & _is_moderate(b) & (_is_moderate(c) | (c == 0)) & (top != 0)))
    if hard.any():
        out[hard] = [_fma_exact(*three) for three in zip(a[hard], b[hard], c[hard], strict=True)]
    return out


def _is_moderate(x: np.ndarray) -> np.ndarray:
    magnitude = np.abs(x)
    return (magnitude > _SMALL) & (magnitude < _LARGE)


def _fma_exact(a: np.float64, b: np.float64, c: np.float64) -> float:
    """One element in rational arithmetic, for extreme exponents and special values."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return float(a * b + c)
    if not math.isfinite(c):
        return float(c)
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        # A zero has the sign of the unfused sum; operands that cancel give +0.
        return float(a * b + c) if a == 0 or b == 0 else 0.0
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf
