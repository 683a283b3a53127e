"""Bit counting and reversal on arrays of unsigned integers, and the high half of products."""

from __future__ import annotations

import numpy as np

_PAIRS, _QUADS, _BYTES = 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F


def _masks(a: np.ndarray) -> list[np.integer]:
    full = (1 << 8 * a.itemsize) - 1
    return [a.dtype.type(m & full) for m in (_PAIRS, _QUADS, _BYTES)]


def popcount(a: np.ndarray) -> np.ndarray:
    """How many bits are set.

    >>> popcount(np.array([0, 5, 2**32 - 1], np.uint32)).tolist()
    [0, 2, 32]
    """
    t = a.dtype.type
    pairs, quads, low = _masks(a)
    a = a - ((a >> t(1)) & pairs)
    a = (a & quads) + ((a >> t(2)) & quads)
    a = (a + (a >> t(4))) & low
    ones = t(0x0101010101010101 & (1 << 8 * a.itemsize) - 1)
    return ((a * ones) >> t(8 * a.itemsize - 8)).astype(np.uint32)


def leading_zeros(a: np.ndarray) -> np.ndarray:
    """How many bits above the highest that is set."""
    t = a.dtype.type
    shift = 1
    while shift < 8 * a.itemsize:
        a = a | (a >> t(shift))
        shift *= 2
    return popcount(~a)


def reversed_bits(a: np.ndarray) -> np.ndarray:
    """The bits in opposite order."""
    t = a.dtype.type
    for mask, shift in zip(_masks(a), (1, 2, 4), strict=True):
        a = ((a >> t(shift)) & mask) | ((a & mask) << t(shift))
    return a.byteswap()


def high_half(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the product of two integers of up to 64 bits.

    >>> int(high_half(np.array([-1]), np.array([2**62]))[0])
    -1
    """
    bits = 8 * a.itemsize
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}8")
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(a.dtype)
    a, b = np.broadcast_arrays(a, b)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + ((x0 * y0) >> half)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":  # signed: take away the other factor where one is negative
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)
