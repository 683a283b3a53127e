"""Philox4x32-10: the counter-based random generator of Salmon et al. (2011), on anything with int64 arithmetic."""

from __future__ import annotations

from typing import Any

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
