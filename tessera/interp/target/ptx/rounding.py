"""Float arithmetic in every rounding direction: exact parts, then one rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from tessera.interp.target.fma import fma, narrow, to_odd

MODES = {"rn", "rz", "rm", "rp"}  # to nearest even, toward zero, toward minus and plus infinity
_F64 = np.dtype(np.float64)


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A sum of doubles and what rounding took from it (Knuth, TAOCP 4.2.2, theorem B)."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    return total, np.where(np.isfinite(total), error, 0.0)


def rounded(total: np.ndarray, error: np.ndarray, dtype: np.dtype, mode: str) -> np.ndarray:
    """A double and its rounding error in a format of at most that width, rounded once."""
    if dtype == _F64:
        return _moved(total, np.sign(error), mode)
    odd = to_odd(total, error)
    near = narrow(odd, dtype)
    return _moved(near, np.sign(odd - near.astype(_F64)), mode)


def _moved(near: np.ndarray, rest: np.ndarray, mode: str) -> np.ndarray:
    """The neighbour that a direction asks for; `rest` is the sign of what the value lacks of the exact one."""
    if mode == "rn":
        return near
    unsigned = np.dtype(f"u{near.dtype.itemsize}")
    bits, one = near.view(unsigned), unsigned.type(1)
    negative = np.signbit(near)
    down = (rest < 0) & (mode == "rm") | (rest < 0) & (mode == "rz") & ~negative
    up = (rest > 0) & (mode == "rp") | (rest > 0) & (mode == "rz") & negative
    bits = np.where(down, np.where(negative, bits + one, bits - one), bits)
    bits = np.where(up, np.where(negative, bits - one, bits + one), bits)
    return bits.view(near.dtype)


def add(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a + b."""
    if mode == "rn":
        return a + b
    total, error = two_sum(a.astype(_F64), b.astype(_F64))
    return _zero_sign(rounded(total, error, a.dtype, mode), a, b, (total == 0) & (error == 0), mode)


def _zero_sign(out: np.ndarray, a: np.ndarray, b: np.ndarray, exact: np.ndarray, mode: str) -> np.ndarray:
    """Numbers whose exact sum is 0 give -0 when rounding down; what is too small to hold is no such sum."""
    if mode != "rm":
        return out
    return np.where(exact & (np.signbit(a) != np.signbit(b)), out.dtype.type(-0.0), out)


def sub(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a - b."""
    return a - b if mode == "rn" else add(a, -b, mode)


def mul(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a * b."""
    if mode == "rn":
        return a * b
    if a.dtype == _F64:
        return _exactly(lambda x, y: x * y, a * b, mode, a, b)
    product = a.astype(_F64) * b.astype(_F64)
    return rounded(product, np.zeros_like(product), a.dtype, mode)


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    """a * b + c."""
    a, b, c = np.broadcast_arrays(a, b, c)
    near = fma(a, b, c)
    if mode == "rn":
        return near
    if a.dtype == _F64:
        rest = _rest(lambda x, y, z: x * y + z, near, a, b, c)
        return _zero_sign(_moved(near, rest, mode), a * b, c, (near == 0) & (rest == 0), mode)
    product = a.astype(_F64) * b.astype(_F64)
    total, error = two_sum(product, c.astype(_F64))
    return _zero_sign(rounded(total, error, a.dtype, mode), product, c, (total == 0) & (error == 0), mode)


def div(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a / b."""
    if mode == "rn":
        return a / b
    if a.dtype == _F64:
        return _exactly(lambda x, y: x / y, a / b, mode, a, b)
    # A quotient of two floats is a float, or too far from all of them for a double to become one.
    quotient = a.astype(_F64) / b.astype(_F64)
    return rounded(quotient, np.zeros_like(quotient), a.dtype, mode)


def sqrt(a: np.ndarray, mode: str) -> np.ndarray:
    """The square root."""
    if mode == "rn":
        return np.sqrt(a)
    if a.dtype == _F64:
        return _directed_roots(a, mode)
    root = np.sqrt(a.astype(_F64))
    return rounded(root, np.zeros_like(root), a.dtype, mode)


def _exactly(function: Callable[..., Fraction], near: np.ndarray, mode: str, *args: np.ndarray) -> np.ndarray:
    """Doubles in a direction by rational arithmetic: slow, and plainly right."""
    return _moved(near, _rest(function, near, *args), mode)


def _rest(function: Callable[..., Fraction], near: np.ndarray, *args: np.ndarray) -> np.ndarray:
    """The sign of what doubles lack of the exact values."""
    args = tuple(np.broadcast_arrays(*args))
    rest = np.zeros(near.shape)
    for place in np.ndindex(near.shape):
        numbers = [float(a[place]) for a in args]
        if all(map(math.isfinite, numbers)) and not math.isnan(near[place]):
            rest[place] = _missing(function, float(near[place]), numbers)
    return rest


def _missing(function: Callable[..., Fraction], near: float, numbers: list[float]) -> int:
    try:
        exact = function(*(Fraction(n) for n in numbers))
    except ZeroDivisionError:
        return 0
    if math.isinf(near):
        return -1 if near > 0 else 1
    return (exact > Fraction(near)) - (exact < Fraction(near))


def _directed_roots(a: np.ndarray, mode: str) -> np.ndarray:
    near, rest = np.sqrt(a), np.zeros(a.shape)
    for place in np.ndindex(a.shape):
        x = float(a[place])
        if math.isfinite(x) and x > 0:
            square = Fraction(float(near[place])) ** 2
            rest[place] = (Fraction(x) > square) - (Fraction(x) < square)
    return _moved(near, rest, mode)
