"""Special functions that NumPy lacks."""

from __future__ import annotations

from typing import Any

import numpy as np

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
_LIMIT = 5.93  # from here on erf rounds to 1 in f64
_CHUNK = 1 << 14


def power(x: Any, y: Any) -> Any:
    """`x` to the power `y`: NumPy takes the square root for one half, which is another function at -0 and -inf."""
    found, half = np.power(x, y), np.equal(y, 0.5)
    return np.where(half & ((x == 0) | np.isinf(x)), np.abs(x), found) if half.any() else found


def _horner(x: Any, first: float, coefficients: tuple[float, ...]) -> Any:
    total = first
    for c in coefficients:
        total = total * x
        total += c
    return total


def erf(x: Any) -> Any:
    """The error function, within two ulps of f64, in the dtype of `x`.

    >>> float(erf(np.float64(0.5)))
    0.5204998778130465
    """
    array = np.asarray(x)
    flat, out = array.reshape(-1), np.empty(array.size, array.dtype)
    for start in range(0, array.size, _CHUNK):  # temporaries that stay in the cache
        out[start : start + _CHUNK] = _erf(flat[start : start + _CHUNK].astype(np.float64))
    return out.reshape(array.shape)


def _erf(x: np.ndarray) -> np.ndarray:
    a = np.minimum(np.abs(x), _LIMIT)
    small = a <= _NEAR
    z = np.where(small, a * a, 0.0)
    c = np.copysign(a, x)
    near = c + c * (_horner(z, _P4, _P) / _horner(z, 1.0, _Q))
    if small.all():
        return near
    tail = np.exp(-a * a) * _horner(a, _C8, _C) / _horner(a, 1.0, _D)
    out = np.where(small, near, np.copysign(1.0 - tail, x))
    return np.where(np.isnan(x), np.nan, out)
