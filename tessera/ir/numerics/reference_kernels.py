"""Reference kernels: NumPy implementations of op semantics: erf (Cody 1969), reductions of short rows, compensated
sums (Knuth; Ogita, Rump and Oishi 2005)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

# Compensated sums, of arrays and of tensors.


# part(x, begin, end): the elements from `begin` to before `end` along the axis that is summed.
SliceFunction = Callable[[Any, int, int], Any]


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """a + b rounded, and exactly what the rounding lost (Knuth, TAOCP 2, 4.2.2, theorem B).

    >>> import numpy as np
    >>> [float(n) for n in two_sum(np.float32(1e8), np.float32(1.0))]
    [100000000.0, 1.0]
    """
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def sum_compensated(x: Any, size: int, part: SliceFunction) -> tuple[Any, Any]:
    """The sum of `size` elements along an axis, a power of two, and the sum of what its roundings lost (None: nothing).

    A tree of halves: each of log2(size) steps adds whole rows, and the lost parts are added the same way. Sum plus
    lost errs by about 2u times the sum of magnitudes, whatever its length (Ogita, Rump and Oishi, "Accurate sum and
    dot product", 2005, for sums on a line).
    """
    lost = None
    while size > 1:
        half = size // 2
        x, error = two_sum(part(x, 0, half), part(x, half, size))
        lost = error if lost is None else error + (part(lost, 0, half) + part(lost, half, size))
        size = half
    return x, lost


# Reductions of many short rows, without NumPy's call of its kernel for each row.


# The longest rows that this speeds up. Sums of longer rows are pairwise, which is more exact.
SHORT_ROW, UNPAIRED_ROW = 1024, 128


def compute_extreme(ufunc: np.ufunc, x: Any, y: Any) -> Any:
    """np.maximum or np.minimum, with -0 less than +0; NumPy returns either of two zeros.

    >>> compute_extreme(np.minimum, np.float32([0, -0.0]), np.float32([-0.0, 0]))
    array([-0., -0.], dtype=float32)
    """
    found = ufunc(x, y)
    if found.dtype.kind != "f":
        return found
    zero = np.equal(found, 0)
    if not zero.any():
        return found
    zero &= np.equal(x, y)
    return found if not zero.any() else np.where(zero, np.add(x, y) if ufunc is np.maximum else -(-x - y), found)


def reduce_extreme(ufunc: np.ufunc, x: np.ndarray, axis: tuple[int, ...] | None, keepdims: bool) -> Any:
    """`ufunc.reduce(x, axis)` for np.maximum or np.minimum, with -0 less than +0.

    >>> reduce_extreme(np.maximum, np.float32([[1, 5], [7, 2]] * 8), (-1,), False)[:2]
    array([5., 7.], dtype=float32)
    """
    found = _reduce_extreme(ufunc, x, axis, keepdims)
    zero = np.equal(found, 0)
    if not zero.any() or x.dtype.kind in "iub" or "int" in x.dtype.name:
        return found
    negative = np.signbit(x) & np.equal(x, 0)
    if not negative.any():
        return found
    if ufunc is np.minimum:
        return np.where(zero & np.any(negative, axis=axis, keepdims=keepdims), -found.dtype.type(0), found)
    positive = np.any(np.equal(x, 0) & ~negative, axis=axis, keepdims=keepdims)
    return np.where(zero & positive, found.dtype.type(0), found)


def accumulate_extreme(ufunc: np.ufunc, x: np.ndarray, axis: int) -> Any:
    """`ufunc.accumulate(x, axis)` for np.maximum or np.minimum, with -0 less than +0.

    >>> accumulate_extreme(np.maximum, np.float32([-0.0, 0, -0.0]), -1)
    array([-0.,  0.,  0.], dtype=float32)
    """
    found = ufunc.accumulate(x, axis=axis)
    zero = np.equal(found, 0)
    if not zero.any() or x.dtype.kind in "iub" or "int" in x.dtype.name:
        return found
    # The zeros up to an element of the result 0 are all that may be it.
    wins = np.equal(x, 0) & (np.signbit(x) == (ufunc is np.minimum))
    won = np.logical_or.accumulate(wins, axis=axis)
    sign = found.dtype.type(0.0 if ufunc is np.maximum else -0.0)
    return np.where(zero, np.where(won, sign, -sign), found)


def _reduce_extreme(ufunc: np.ufunc, x: np.ndarray, axis: tuple[int, ...] | None, keepdims: bool) -> Any:
    if not _has_short_rows(x, axis, SHORT_ROW) or x.size < 8 * x.shape[-1]:
        return ufunc.reduce(x, axis=axis, keepdims=keepdims)
    if x.flags.c_contiguous:
        found = ufunc.reduceat(x.reshape(-1), _row_starts(x.size, x.shape[-1])).reshape(x.shape[:-1])
        return found[..., None] if keepdims else found
    order = sorted(range(x.ndim - 1), key=lambda a: -x.strides[a])  # memory may hold the leading axes in any
    level = x.transpose(*order, -1)
    if not level.flags.c_contiguous:
        return ufunc.reduce(x, axis=axis, keepdims=keepdims)
    back = _reduce_extreme(ufunc, level, axis, False).transpose(*map(order.index, range(len(order))))
    return back[..., None] if keepdims else back


@lru_cache(maxsize=64)
def _row_starts(size: int, length: int) -> np.ndarray:
    """Where rows begin."""
    return np.arange(0, size, length)


def sum_rows(x: np.ndarray, axis: tuple[int, ...] | None, keepdims: bool) -> Any:
    """The sum of floats along `axis`, in their own type; a row's is the same whatever rows are beside it.

    >>> sum_rows(np.float32([[1, 5], [7, 2]] * 8), (-1,), False)[:2]
    array([6., 9.], dtype=float32)
    """
    if not _has_short_rows(x, axis, UNPAIRED_ROW):
        return np.sum(x, axis=axis, keepdims=keepdims, dtype=x.dtype)
    found = np.einsum("...i->...", x)
    return found[..., None] if keepdims else found


def _has_short_rows(x: np.ndarray, axis: Any, longest: int) -> bool:
    """Whether the last axis alone is reduced, and its rows are short, and of floats side by side."""
    if axis not in ((-1,), -1) or not 0 < x.shape[-1] <= longest:
        return False
    return x.dtype in (np.float32, np.float64) and x.strides[-1] == x.itemsize


# Special functions.


# W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23 (1969).
# For |x| below _NEAR, erf(x) = x + x·(P − Q)/Q: the small correction keeps the last bits of x.
_NEAR = 0.477
_P = (-2.044016720847355530e1, -1.30160483783394017e2, -9.05131288392070259e2, 3.6514075569929885e2)
_P4 = -0.814222293815396847
_Q = (2.36012909523441209e01, 2.44024637934444173e02, 1.28261652607737228e03, 2.84423683343917062e03)
_C = (
    5.64188496988670089e-1, 8.88314979438837594e00, 6.61191906371416295e01, 2.98635138197400131e02,
    8.81952221241769090e02, 1.71204761263407058e03, 2.05107837782607147e03, 1.23033935479799725e03,
)  # fmt: skip
_C8 = 2.15311535474403846e-8
_D = (
    1.57449261107098347e01, 1.17693950891312499e02, 5.37181101862009858e02, 1.62138957456669019e03,
    3.29079923573345963e03, 4.36261909014324716e03, 3.43936767414372164e03, 1.23033935480374942e03,
)  # fmt: skip
# Beyond 4, erfc(x) = exp(-x²)/x · (1/sqrt(pi) - z·S(z)/T(z)) for z = 1/x².
_S0 = 1.63153871373020978e-2
_S = (
    3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1, 1.60837851487422766e-2,
    6.58749161529837803e-4,
)  # fmt: skip
_T = (
    2.56852019228982242e00, 1.87295284992346725e00, 5.27905102951428412e-1, 6.05183413124413191e-2,
    2.33520497626869185e-3,
)  # fmt: skip
_LIMIT = 5.93  # from here on erf rounds to 1 in f64
_CHUNK = 1 << 14


def compute_power(x: Any, y: Any) -> Any:
    """`x` to the power `y`: NumPy takes the square root for one half, which is another function at -0 and -inf."""
    found, half = np.power(x, y), np.equal(y, 0.5)
    return np.where(half & ((x == 0) | np.isinf(x)), np.abs(x), found) if half.any() else found


def _evaluate_horner(x: Any, first: float, coefficients: tuple[float, ...]) -> Any:
    total = first
    for c in coefficients:
        total = total * x
        total += c
    return total


def compute_erf(x: Any) -> Any:
    """The error function, within two ulps of f64, in the dtype of `x`.

    >>> float(compute_erf(np.float64(0.5)))
    0.5204998778130465
    """
    array = np.asarray(x)
    flat, out = array.reshape(-1), np.empty(array.size, array.dtype)
    for start in range(0, array.size, _CHUNK):  # temporaries that stay in the cache
        out[start : start + _CHUNK] = _compute_erf_chunk(flat[start : start + _CHUNK].astype(np.float64))
    return out.reshape(array.shape)


def _compute_erf_chunk(x: np.ndarray) -> np.ndarray:
    a = np.minimum(np.abs(x), _LIMIT)
    small = a <= _NEAR
    z = np.where(small, a * a, 0.0)
    c = np.copysign(a, x)
    near = c + c * (_evaluate_horner(z, _P4, _P) / _evaluate_horner(z, 1.0, _Q))
    if small.all():
        return near
    tail = np.exp(-a * a) * _evaluate_horner(a, _C8, _C) / _evaluate_horner(a, 1.0, _D)
    out = np.where(small, near, np.copysign(1.0 - tail, x))
    return np.where(np.isnan(x), np.nan, out)


def compute_erfc(x: Any) -> Any:
    """The complementary error function, 1 - erf(x) without cancellation, in the dtype of `x`.

    >>> print(f"{compute_erfc(np.float64(10.0)):.14e}")
    2.08848758376254e-45
    """
    x = np.asarray(x)
    a = np.minimum(np.abs(x).astype(np.float64), 30.0)  # from 27.3 on it is 0 in f64
    squared = np.trunc(a * 16) / 16  # exp(-a²) as a product, since the rounding error of a² would be magnified
    power = np.exp(-squared * squared) * np.exp(-(a - squared) * (a + squared))
    middle = _evaluate_horner(a, _C8, _C) / _evaluate_horner(a, 1.0, _D)
    far = np.maximum(a, 4.0)
    z = 1 / (far * far)
    far = (1 / np.sqrt(np.pi) - z * _evaluate_horner(z, _S0, _S) / _evaluate_horner(z, 1.0, _T)) / far
    tail = power * np.where(a <= 4.0, middle, far)
    near = 1.0 - compute_erf(x.astype(np.float64))
    out = np.where(a <= _NEAR, near, np.where(x < 0, 2.0 - tail, tail))
    return np.where(np.isnan(x), np.nan, out).astype(x.dtype)
