"""Conversion and rounding: one exact rounding from a source to a target format, with direction, saturation and flushed
denormals; stochastic rounding by Philox4x32-10 (Salmon et al. 2011).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tessera.core.types import DType, Policy, bf16, f32, f64, fp4, fp6, fp6_e2m3, int4, tf32, uint64

# Philox4x32-10: the counter-based random generator of Salmon et al. (2011), on anything with int64 arithmetic.


# Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011), table 2 and section 4.3.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW_32_BITS = 0xFFFFFFFF


def philox_4x32(counter: Any, key: Any) -> tuple[Any, Any, Any, Any]:
    """Four random words for a counter of four and a key of two, each a 32-bit number held in int64.

    >>> import numpy as np
    >>> zero = np.zeros(1, np.int64)
    >>> [hex(int(w[0])) for w in philox_4x32((zero, zero, zero, zero), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        high_a, low_a = _multiply_words(a, MULTIPLIERS[0])
        high_c, low_c = _multiply_words(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = (first + WEYL[0]) & LOW_32_BITS, (second + WEYL[1]) & LOW_32_BITS
    return a, b, c, d


def _multiply_words(x: Any, factor: int) -> tuple[Any, Any]:
    """The high and low words of a product, which fills 64 bits: int64 wraps, and its bits are those of the product."""
    whole = x * factor
    return (whole >> 32) & LOW_32_BITS, whole & LOW_32_BITS


# Rounding to a float format under a policy: three directions, saturation, flushed denormals, each exact.


FINITE_ONLY = (fp6, fp6_e2m3, fp4)  # neither infinity nor NaN: they always saturate


@dataclass(frozen=True)
class FloatGrid:
    """The numbers of a format: `digits` after the leading bit, the least exponent, the largest number."""

    digits: int
    least: int
    top: float
    infinite: bool


@functools.cache
def find_float_grid(dtype: DType) -> FloatGrid:
    """The grid of an element type.

    >>> from tessera.core.types import f16
    >>> find_float_grid(f16)
    FloatGrid(digits=10, least=-14, top=65504.0, infinite=True)
    """
    if dtype is tf32:  # stored as f32 with ten digits
        return FloatGrid(10, -126, (2.0 - 2.0**-10) * 2.0**127, True)
    info = ml_dtypes.finfo(dtype.numpy)
    least = int(np.frexp(np.float64(info.smallest_normal))[1]) - 1
    infinite = dtype not in FINITE_ONLY and bool(np.isinf(np.asarray(np.inf).astype(dtype.numpy).astype(np.float64)))
    return FloatGrid(int(info.nmant), least, float(info.max), infinite)


def round_to_format(
    array: Any,
    to: DType,
    rounding: str = "nearest",
    saturate: bool = False,
    flush: bool = False,
    seed: int = 0,
    draw: Any = None,
) -> np.ndarray:
    """`array` on the grid of a float type, rounded once; the arithmetic is exact, in f64.

    `rounding` is "nearest" (ties to even), "toward_zero", or "stochastic": up with the probability of the distance
    from below, by random bits that depend on `seed` and the element's place alone (or by `draw`, 53 bits for each
    element). Numbers beyond the largest give infinity (NaN where there is none), and the largest itself under
    `saturate` or toward zero. `flush` makes results below the least normal number zero. Signs are kept, of zeros too.

    >>> from tessera.core.types import fp8_e4m3
    >>> round_to_format([1.06, 1000.0, -1000.0], fp8_e4m3, "toward_zero").astype(float)
    array([   1.,  448., -448.])
    """
    toward_zero = rounding == "toward_zero"
    wide = widen_to_double(np.asarray(array), odd=to.bits <= 32 and rounding != "stochastic", toward_zero=toward_zero)
    if to.bits > 32:
        wide = np.where(np.isinf(wide), np.copysign(np.finfo(np.float64).max, wide), wide) if saturate else wide
        return wide if not flush else np.where(np.abs(wide) < np.finfo(np.float64).tiny, np.copysign(0.0, wide), wide)
    grid = find_float_grid(to)
    wide = np.where(np.isnan(wide), 0.0, wide) if to in FINITE_ONLY else wide
    with np.errstate(all="ignore"):
        size, known = np.abs(wide), np.isfinite(wide)
        exponent = np.maximum(np.frexp(size)[1] - 1, grid.least) - grid.digits
        steps = ROUNDING_DIRECTIONS[rounding](np.ldexp(size, -exponent), seed, draw)
        near = np.where(known, np.ldexp(steps, exponent), size)
        near = _apply_overflow(near, known & toward_zero, to, grid, saturate)
        near = np.where(near < 2.0**grid.least, 0.0, near) if flush else near
        return np.copysign(near, wide).astype(to.numpy)


def _apply_overflow(near: np.ndarray, stays: np.ndarray, to: DType, grid: FloatGrid, saturate: bool) -> np.ndarray:
    """Overflow: numbers beyond the largest; `stays` marks those that saturate whatever the policy."""
    beyond = near > grid.top
    outside = grid.top if saturate or to in FINITE_ONLY else np.inf if grid.infinite else np.nan
    return np.where(beyond, np.where(stays, grid.top, outside), near)


def _round_stochastically(steps: np.ndarray, seed: int, draw: Any) -> np.ndarray:
    below = np.floor(steps)
    bits = draw_random_bits(np.arange(steps.size).reshape(steps.shape), seed) if draw is None else draw
    return below + (bits < (steps - below) * 2.0**53)


def draw_random_bits(place: Any, seed: int) -> Any:
    """53 random bits for each place, by its number and the seed; arrays and tensors alike.

    >>> bool(np.all(draw_random_bits(np.arange(1000), 7) < 2**53))
    True
    >>> bool(draw_random_bits(np.arange(2), 7)[1] == draw_random_bits(np.arange(1, 2), 7)[0])
    True
    """
    high, low, _, _ = philox_4x32(
        (place & LOW_32_BITS, place >> 32, 0, 1), (seed & LOW_32_BITS, (seed >> 32) & LOW_32_BITS)
    )
    return ((high >> 5) << 26) + (low >> 6)


ROUNDING_DIRECTIONS = {
    "nearest": lambda steps, seed, draw: np.rint(steps),
    "toward_zero": lambda steps, seed, draw: np.trunc(steps),
    "stochastic": _round_stochastically,
}


# Conversions between element types: one rounding, from the source to the target format.


def convert(array: Any, to: DType, saturate: bool = False) -> Any:
    """`array` as elements of `to`: nearest-even for floats, toward zero and saturating for integers.

    A float beyond the target's range becomes its infinity, or NaN where it has none; with
    `saturate`, its largest finite value. NaN becomes integer 0, and +0 where a float format has none.

    >>> from tessera.core.types import int8
    >>> convert(np.float32([1.0, 3.9, -3.9, 1e9]), int8)
    array([  1,   3,  -3, 127], dtype=int8)
    """
    array = np.asarray(array)
    if array.dtype == to.numpy and to is not tf32 and not (saturate and to.is_float):
        return array  # a sum in f32 may overflow though no conversion follows, and operands may be infinite
    if to is f32 and array.itemsize <= 2 and array.dtype.kind in "fV" and not saturate:
        return array.astype(np.float32)  # exact, and often done
    if array.dtype == int4.numpy:  # not an integer to NumPy: int8 holds it, and wraps as integers do
        array = array.astype(np.int8)
    if to.is_integer and array.dtype.kind not in "iub":
        return _convert_to_integer(array, to)
    if to in (bf16, tf32) and array.dtype.kind in "iu" and array.itemsize > 2:
        array = widen_to_double(array, odd=True)  # not every one is an f32, and only the last rounding counts
    if to is tf32:
        return _round_mantissa(_clip_to_range(array, to) if saturate else array, 13)
    if to.is_float and to.bits < 32 and array.dtype == f64.numpy and to.numpy != np.dtype(np.float16):
        array = _round_to_odd(array)
    with np.errstate(all="ignore"):
        if to in FINITE_ONLY and array.dtype.kind in "fV":
            array = np.where(array != array, array.dtype.type(0), array)  # NaN gives +0, whatever its sign
        if to.is_float and saturate:
            array = _clip_to_range(array, to)
        return array.astype(to.numpy)


def round_to_storage(array: Any, to: DType, policy: Policy | None, seed: int = 0) -> Any:
    """`array` as elements of `to`, rounded, saturated and flushed as the policy says.

    Stochastic rounding takes its random bits from `seed` and each element's place.

    >>> from tessera.core.types import flush_denormals
    >>> round_to_storage(np.float32([1e-40, 1.0]), f32, f32 @ flush_denormals)
    array([0., 1.], dtype=float32)
    """
    if policy is None:
        return convert(array, to)
    if not to.is_float or (policy.rounding == "nearest" and policy.denormals == "preserve"):
        return convert(array, to, saturate=policy.saturate)
    return round_to_format(array, to, policy.rounding, policy.saturate, policy.denormals == "flush", seed)


def _convert_to_integer(array: np.ndarray, to: DType) -> np.ndarray:
    info = ml_dtypes.iinfo(to.numpy)
    wide = np.trunc(np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf))
    # 2**63 - 1 is not a double: values at or beyond the top are set as integers.
    top, bottom = wide >= float(info.max), wide <= float(info.min)
    out = np.where(top | bottom, 0.0, wide).astype(np.uint64 if to is uint64 else np.int64)
    return np.where(top, int(info.max), np.where(bottom, int(info.min), out)).astype(to.numpy)


def widen_to_double(array: np.ndarray, odd: bool = False, toward_zero: bool = False) -> np.ndarray:
    """Numbers as f64. Integers beyond 53 bits are rounded to odd, so that a second rounding is exact, or toward zero.

    >>> [hex(int(v)) for v in widen_to_double(np.array([2**60 + 1, 1 - 2**60]), odd=True)]
    ['0x1000000000000100', '-0xfffffffffffff80']
    """
    if array.dtype.kind not in "iu" or array.itemsize < 8 or not (odd or toward_zero):
        return array.astype(np.float64)
    size = np.abs(array).view(np.uint64)  # the magnitude of the least int64, too
    near = size.astype(np.float64)
    beyond = near >= 2.0**64
    cut = np.where(beyond | (np.where(beyond, 0.0, near).astype(np.uint64) > size), np.nextafter(near, 0.0), near)
    if odd:
        cut = (cut.view(np.uint64) | (cut.astype(np.uint64) != size)).view(np.float64)
    return np.where(array < 0, -cut, cut)


def _round_to_odd(array: np.ndarray) -> np.ndarray:
    """f64 to f32 by rounding to odd: a second rounding to a format of ≤ 22 bits is then exact.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums" (2008).
    """
    with np.errstate(all="ignore"):
        near = array.astype(np.float32)
        bits = near.view(np.uint32)
        back = near.astype(np.float64)
        inexact = (back != array) & np.isfinite(near)
        away = np.abs(back) > np.abs(array)
    toward = np.where(inexact & away, bits - np.uint32(1), bits)
    return np.where(inexact, toward | np.uint32(1), bits).astype(np.uint32).view(np.float32)


def _round_mantissa(array: np.ndarray, dropped: int) -> np.ndarray:
    """f32 with the lowest `dropped` mantissa bits rounded away, nearest-even (tf32: 13)."""
    single = _round_to_odd(array) if array.dtype == f64.numpy else array.astype(f32.numpy)
    bits = single.view(np.uint32)
    half = np.uint32((1 << (dropped - 1)) - 1)
    even = (bits >> np.uint32(dropped)) & np.uint32(1)
    rounded = (bits + half + even) & np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    return np.where(np.isfinite(single), rounded, bits).astype(np.uint32).view(np.float32)


def _clip_to_range(array: np.ndarray, to: DType) -> np.ndarray:
    top = find_float_grid(to).top
    if array.dtype.kind in "fV" and array.itemsize < (8 if to is f64 else 4):  # which may not hold the limit
        array = array.astype(np.float64 if to is f64 else np.float32)
    return np.where(np.isnan(array.astype(np.float64)), array, np.clip(array, -top, top))
