"""Argument reduction by quarter turns: what is left of an angle after the nearest multiple of pi/2, and that multiple.

Up to a size by pi/2 in parts (Cody and Waite 1980), beyond it by the digits of 2/pi that count (Payne and Hanek 1983).
"""

from __future__ import annotations

from tessera.core.types import f64, int32, int64, uint64
from tessera.ir.tensor import Tensor
from tessera.lower.scalar_functions.decomposition import constant
from tessera.ops.dialects.arith import bitcast, fma, multiply_high
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import where

QUARTER_TURNS, ROUND_TO_INTEGER_F64 = 0.63661977236758134308, 6755399441055744.0  # 2/pi; 1.5 * 2^52
HALF_PI, HALF_PI_LOW = 1.57079632679489661923, 6.123233995736766e-17
SMALL_ANGLE = 2.0**30  # up to here three parts of pi/2 suffice for every f64


def reduce_quarter_turns(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """What is left of f64 x after the nearest multiple of pi/2, by so many parts of pi/2, and that multiple's bits."""
    shifted = fma(x, QUARTER_TURNS, ROUND_TO_INTEGER_F64)
    n = shifted - ROUND_TO_INTEGER_F64
    rest = x
    for part in (-1.57079632679489655800, -6.12323399573676603587e-17, 1.4973849048591833e-33)[:parts]:
        rest = fma(n, part, rest)
    return rest, bitcast(shifted, dtype=int64)


# Of f32.

SMALL_ANGLE_F32 = 2.0**16  # up to here, which every finite f16 is, three parts of pi/2 suffice for every f32
ROUND_TO_INTEGER_F32 = 12582912.0  # 1.5 * 2^23


def reduce_small_quarter_turns(x: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of f32 x, |x| < `SMALL_ANGLE_F32`, after the nearest multiple of pi/2, and that multiple's bits.

    The first part of pi/2 ends with a zero, so that the difference from its multiple is exact. Negative parts keep -0.
    """
    shifted = fma(x, QUARTER_TURNS, ROUND_TO_INTEGER_F32)
    n = shifted - ROUND_TO_INTEGER_F32
    rest = x
    for part in (-1.570796251296997, -7.549789415861596e-08, -5.390302953474238e-15):
        rest = fma(n, part, rest)
    return rest, bitcast(shifted, dtype=int32)


# From each size on: a power of two by which x is a whole multiple m below 2^51, and 2/pi divided by it, modulo 4, in
# parts of 29, 29 and 53 bits. Products of m with the first two are exact.
LARGE_QUARTER_TURNS = (
    (0.0, 1.0, 0.6366197690367699, 3.3308114738561656e-09, 2.276010073078396e-18),
    (2.0**50, 2.0**27, 3.447053946554661, 2.168126039814311e-09, 1.0330342399379403e-17),
    (2.0**77, 2.0**54, 1.291000947356224, 5.111805381763368e-09, 3.0053182646326145e-18),
    (2.0**104, 2.0**81, 2.6860949024558067, 2.2660121279383105e-09, 1.0688538751642284e-17),
)


def reduce_all_quarter_turns(x: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of any f32 x after the nearest multiple of pi/2, in f64, and that multiple's bits."""
    size = e.abs(x)
    chosen = [constant(value, f64) for value in (1.0, *LARGE_QUARTER_TURNS[0][2:])]
    for least, unit, *parts in LARGE_QUARTER_TURNS[1:]:
        large = size >= least
        chosen = [where(large, constant(new, f64), old) for new, old in zip((1.0 / unit, *parts), chosen, strict=True)]
    scale, first, second, third = chosen
    m = cast(x, dtype=f64) * scale
    high, middle, low = _drop_whole_turns(m * first), _drop_whole_turns(m * second), m * third
    shifted = high + middle + low + ROUND_TO_INTEGER_F64
    rest = (high - (shifted - ROUND_TO_INTEGER_F64)) + middle + low
    return rest * HALF_PI, bitcast(shifted, dtype=int64)


def _drop_whole_turns(x: Tensor) -> Tensor:
    """x less the nearest multiple of 4: exact for |x| < 2^53."""
    turns = fma(x, 0.25, ROUND_TO_INTEGER_F64) - ROUND_TO_INTEGER_F64
    return fma(turns, -4.0, x)


# Of f64.

# The digits of 2/pi, 64 bits each, after a word of zeros.
DIGITS = (
    0, 0xA2F9836E4E441529, 0xFC2757D1F534DDC0, 0xDB6295993C439041, 0xFE5163ABDEBBC561, 0xB7246E3A424DD2E0,
    0x06492EEA09D1921C, 0xFE1DEB1CB129A73E, 0xE88235F52EBB4484, 0xE99C7026B45F7E41, 0x3991D639835339F4,
    0x9C845F8BBDF9283B, 0x1FF897FFDE05980F, 0xEF2F118B5A0A6D1F, 0x6D367ECF27CB09B7, 0x4F463F669E5FEA2D,
    0x7527BAC7EBE5F17B, 0x3D0739F78A5292EA, 0x6BFB5FB11F8D5D08, 0x56033046FC7B6BAB,
)  # fmt: skip
FRACTION, LEADING_ONE, FIRST_EXPONENT = (1 << 52) - 1, 1 << 52, 1013


def reduce_large_quarter_turns(x: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of f64 x, |x| >= 1, after the nearest multiple of pi/2, and that multiple modulo 4."""
    bits = bitcast(x, dtype=int64)
    m = bitcast((bits & FRACTION) | LEADING_ONE, dtype=uint64)
    high, middle, low = _select_digits(((bits >> 52) & 0x7FF) - FIRST_EXPONENT)
    # The product in units of 2^-126 quarter turns, modulo 4 of them; what is dropped is less than one unit.
    carried = multiply_high(m, low)
    lower = m * middle + carried
    carry = where(lower < carried, constant(1, int64), constant(0, int64))
    upper = m * high + multiply_high(m, middle) + bitcast(carry, dtype=uint64)
    fraction = bitcast((upper << 2) | (lower >> 62), dtype=int64)
    number = bitcast((upper + (1 << 61)) >> 62, dtype=int64)
    rest = _scale_fraction(fraction, lower << 2) + (x - x)  # NaN for infinity
    negative = bits < 0
    return where(negative, rest * -1.0, rest), where(negative, number * -1, number)


def _select_digits(place: Tensor) -> list[Tensor]:
    """Three words of the digits from this bit on: of the word's number each bit moves the list by a power of two."""
    words = [constant(word - (word >> 63 << 64), int64) for word in DIGITS]
    zero = constant(0, int64)
    for bit in (4, 3, 2, 1, 0):
        step = 1 << bit
        moved = ((place >> (6 + bit)) & 1) == 1
        later = [*words[step:], *[zero] * step]
        words = [where(moved, far, near) for far, near in zip(later[: step + 3], words[: step + 3], strict=True)]
    words = [bitcast(word, dtype=uint64) for word in words]
    shift = bitcast(place & 63, dtype=uint64)
    return [(a << shift) | ((b >> 1) >> (shift ^ 63)) for a, b in zip(words, words[1:], strict=False)]


def _scale_fraction(upper: Tensor, lower: Tensor) -> Tensor:
    """A fraction of a quarter turn, 64 signed bits and 64 more, as an angle of full precision.

    Four parts of 32 bits: the first three may vanish but for a few bits, and then the others have the digits.
    """
    below = [bitcast(part, dtype=int64) for part in (lower >> 32, lower & 0xFFFFFFFF)]
    parts = [upper >> 32, upper & 0xFFFFFFFF, *below]
    a, b, c, d = (cast(part, dtype=f64) * 2.0**-power for part, power in zip(parts, (32, 64, 96, 128), strict=True))
    head = a + b
    tail = (b - (head - a)) + (c + d)
    return fma(head, HALF_PI, fma(head, HALF_PI_LOW, tail * HALF_PI))
