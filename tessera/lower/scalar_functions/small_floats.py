"""Rounding and small float codec in IR: to fewer bits of mantissa, to odd, toward zero, stochastically; types of eight
bits or fewer (OCP Microscaling 2023) decoded, encoded and rounded.

Each builder gives a function of scalars that code generators emit. The grid of a type says which numbers it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tessera.core.types import DType, Policy, f32, f64, fp4, fp6, fp6_e2m3, fp8_e4m3, fp8_e5m2, int32, int64, uint32
from tessera.ir.core import Function
from tessera.ir.numerics.conversion import FINITE_ONLY, FloatGrid, find_float_grid
from tessera.ir.tensor import Tensor
from tessera.lower.scalar_functions.decomposition import constant, trace_rule
from tessera.ops.dialects.arith import bitcast, copysign, extract_bit, is_nan, trunc
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import where

F32_MANTISSA_BITS, F32_MIN_EXPONENT = 23, -126
F64_MANTISSA_BITS, F64_BIAS = 52, 1023
INF, NAN = float("inf"), float("nan")


def add_half_step(bits: Tensor, dropped: int) -> Tensor:
    """The bits of a float plus half a step: with the lower `dropped` bits cut off they are rounded to nearest even."""
    return bits + ((1 << (dropped - 1)) - 1) + extract_bit(bits, dropped)


def clear_low_bits(bits: Tensor, count: int) -> Tensor:
    """The 32 bits of a float with the lowest ones 0."""
    return bits & ((1 << 32) - (1 << count))


@cache
def build_mantissa_rounding(dropped: int) -> Function:
    """The function that rounds an f32 to `dropped` bits of mantissa fewer, ties to even."""

    def round_mantissa(x: Tensor) -> Tensor:
        rounded = clear_low_bits(add_half_step(bitcast(x, dtype=uint32), dropped), dropped)
        return where(is_nan(x), NAN, bitcast(rounded, dtype=f32))

    return trace_rule(round_mantissa, (f32,))


@cache
def build_rounding_to_odd() -> Function:
    """The function from f64 to f32 by rounding to odd: a second rounding is then exact (Boldo and Melquiond 2008)."""

    def round_to_odd(x: Tensor) -> Tensor:
        near = cast(x, dtype=f32)
        bits = bitcast(near, dtype=int32)
        back = cast(near, dtype=f64)
        inexact = (back != x) & (e.abs(near) < INF)
        bits = where(inexact & (e.abs(back) > e.abs(x)), bits - 1, bits)
        return bitcast(where(inexact, bits | 1, bits), dtype=f32)

    return trace_rule(round_to_odd, (f64,))


@cache
def build_double_truncation() -> Function:
    """The function from f64 to f32 by rounding toward zero; finite numbers stay finite."""

    def truncate(x: Tensor) -> Tensor:
        near = cast(x, dtype=f32)
        bits = bitcast(near, dtype=int32)
        return bitcast(where(e.abs(cast(near, dtype=f64)) > e.abs(x), bits - 1, bits), dtype=f32)

    return trace_rule(truncate, (f64,))


@cache
def build_saturation(dtype: DType, top: float) -> Function:
    """The function that gives the largest number for larger ones, infinities among them; NaN stays."""

    def saturate(x: Tensor) -> Tensor:
        size = e.abs(x)
        return copysign(where(size > top, top, size), x)

    return trace_rule(saturate, (dtype,))


@cache
def build_flush(dtype: DType, least_normal: float) -> Function:
    """The function that gives 0, with the sign of the operand, for denormals."""

    def flush(x: Tensor) -> Tensor:
        size = e.abs(x)
        return copysign(where(size < least_normal, 0.0, size), x)

    return trace_rule(flush, (dtype,))


@cache
def build_truncation(dtype: DType) -> Function:
    """The function that rounds an f32 toward zero to a narrower type; finite numbers stay finite."""
    grid = find_float_grid(dtype)

    def truncate(x: Tensor) -> Tensor:
        found = _truncate_mantissa(x, grid)
        size = e.abs(found)
        too_large = (size > grid.top) & (size < INF)
        return copysign(where(too_large, grid.top, size), found)

    return trace_rule(truncate, (f32,))


def _truncate_mantissa(x: Tensor, grid: FloatGrid) -> Tensor:
    """Fewer digits; below the least normal number all steps are equal. NaN and infinity stay."""
    size = e.abs(x)
    kept = bitcast(clear_low_bits(bitcast(x, dtype=uint32), F32_MANTISSA_BITS - grid.digits), dtype=f32)
    if grid.least > F32_MIN_EXPONENT:
        step = 2.0 ** (grid.least - grid.digits)
        kept = where(size < 2.0**grid.least, trunc(x * (1 / step)) * step, kept)
    return where(size < INF, kept, x)


def find_overflow_value(policy: Policy) -> float:
    """The value that numbers too large for a policy's storage become."""
    grid = find_float_grid(policy.storage)
    if policy.saturate or policy.storage in FINITE_ONLY:
        return grid.top
    return INF if grid.infinite else NAN


@cache
def build_stochastic_rounding(policy: Policy) -> Function:
    """The function from an f64 and 53 random bits to an f32 on the grid of a policy's storage.

    It rounds up where the bits, as a fraction, are less than the distance from the neighbour below.
    """
    grid, flush = find_float_grid(policy.storage), policy.denormals == "flush"

    def round_stochastically(x: Tensor, draw: Tensor) -> Tensor:
        near = _choose_neighbour(e.abs(x), draw, grid)
        near = where(near > grid.top, find_overflow_value(policy), near)
        if flush:
            near = where(near < 2.0**grid.least, 0.0, near)
        return cast(copysign(near, x), dtype=f32)

    return trace_rule(round_stochastically, (f64, int64))


def _choose_neighbour(size: Tensor, draw: Tensor, grid: FloatGrid) -> Tensor:
    """Of the two neighbours of a magnitude on a grid, the one that a draw chooses; infinity and NaN stay.

    The magnitude is scaled to steps of the grid and back by powers of two, which is exact.
    """
    exponent = e.maximum(bitcast(size, dtype=int64) >> F64_MANTISSA_BITS, grid.least + F64_BIAS)
    steps = size * _make_power_of_two(grid.digits + 2 * F64_BIAS - exponent)
    low = e.floor(steps)
    distance = (steps - low) * 2.0**53
    up = cast(draw, dtype=f64) < distance
    near = where(up, low + 1.0, low) * _make_power_of_two(exponent - grid.digits)
    return where(size < INF, near, size)


def _make_power_of_two(biased_exponent: Tensor) -> Tensor:
    """Two to a power, by its biased exponent in f64."""
    return bitcast(biased_exponent << F64_MANTISSA_BITS, dtype=f64)


# Small float codec.
#
# In memory each value occupies a byte, as in ml_dtypes: sign, exponent, mantissa. Codes are uint32 here, values f32.


F32_BIAS, F32_SIGN_BIT = 127, 31


@dataclass(frozen=True)
class SmallFloatFormat:
    """A format: bits of exponent and mantissa (`digits`), the exponent's bias, the largest number, the special codes.

    `infinity` and `nan` are codes without the sign, or None where the format has none.
    """

    exponent: int
    digits: int
    bias: int
    top: float
    infinity: int | None = None
    nan: int | None = None

    @property
    def sign(self) -> int:
        """The number of the sign bit."""
        return self.exponent + self.digits

    @property
    def beyond(self) -> float:
        """The value that a number too large becomes."""
        return float("inf") if self.infinity is not None else NAN if self.nan is not None else self.top

    @property
    def dropped(self) -> int:
        """How many bits of the mantissa of an f32 the format lacks."""
        return F32_MANTISSA_BITS - self.digits

    @property
    def min_exponent(self) -> int:
        """The exponent of the least normal number."""
        return 1 - self.bias

    @property
    def top_code(self) -> int:
        """The code of the largest number."""
        if self.infinity is not None:
            return self.infinity - 1
        return (1 << self.sign) - 1 if self.nan is None else self.nan - 1

    @property
    def beyond_code(self) -> int:
        """The code that a number too large becomes."""
        found = self.infinity if self.infinity is not None else self.nan
        return self.top_code if found is None else found


SMALL_FLOAT_FORMATS: dict[DType, SmallFloatFormat] = {
    fp8_e4m3: SmallFloatFormat(4, 3, 7, 448.0, nan=0x7F),
    fp8_e5m2: SmallFloatFormat(5, 2, 15, 57344.0, infinity=0x7C, nan=0x7E),
    fp6: SmallFloatFormat(3, 2, 3, 28.0),
    fp6_e2m3: SmallFloatFormat(2, 3, 1, 7.5),
    fp4: SmallFloatFormat(2, 1, 1, 6.0),
}


@cache
def decode_shift(dtype: DType) -> int:
    """By how many bits a code is shifted left before it is decoded: its sign is then bit 31."""
    return F32_SIGN_BIT - SMALL_FLOAT_FORMATS[dtype].sign


@cache
def build_decoder(dtype: DType) -> Function:
    """The function from a code, shifted left by `decode_shift`, to its value. Lower bits may be anything.

    The code becomes the bits of an f32 of small exponent, and that times a power of two is exact.
    """
    form, shift = SMALL_FLOAT_FORMATS[dtype], decode_shift(dtype)

    def decode(word: Tensor) -> Tensor:
        magnitude = word & (((1 << form.sign) - 1) << shift)
        size = bitcast(magnitude >> (shift - form.dropped), dtype=f32) * 2.0 ** (F32_BIAS - form.bias)
        if form.infinity is not None:
            size = where(magnitude > form.infinity << shift, NAN, size)
            size = where(magnitude == form.infinity << shift, form.beyond, size)
        elif form.nan is not None:
            size = where(magnitude == form.nan << shift, NAN, size)
        return bitcast(bitcast(size, dtype=uint32) | (word & (1 << F32_SIGN_BIT)), dtype=f32)

    return trace_rule(decode, (uint32,))


@cache
def build_exact_encoder(dtype: DType) -> Function:
    """The function from a value of the format to its code. NaN becomes +0 where the format has none."""
    form = SMALL_FLOAT_FORMATS[dtype]

    def encode(x: Tensor) -> Tensor:
        sign = _move_sign(bitcast(x, dtype=uint32), form)
        size = e.abs(x)
        code = bitcast(size * 2.0 ** (form.bias - F32_BIAS), dtype=uint32) >> form.dropped
        if form.infinity is not None:
            code = where(size == float("inf"), form.infinity, code)
        if form.nan is None:
            return where(is_nan(x), 0, code | sign)
        return where(is_nan(x), form.nan, code) | sign

    return trace_rule(encode, (f32,))


def _move_sign(bits: Tensor, form: SmallFloatFormat) -> Tensor:
    """The sign of an f32 as the sign bit of a code."""
    return (bits >> (F32_SIGN_BIT - form.sign)) & (1 << form.sign)


@cache
def build_rounding(dtype: DType) -> Function:
    """The function that rounds an f32 to the nearest value of a format, ties to even.

    Below the least normal number all steps are equal: adding a number whose last digit is one step rounds to them.
    NaN becomes +0 where the format has none, whatever its sign, in which processors differ.
    """
    form = SMALL_FLOAT_FORMATS[dtype]
    shift = 2.0 ** (form.min_exponent - form.digits + F32_MANTISSA_BITS)

    def round_to_format(x: Tensor) -> Tensor:
        size = e.abs(x)
        tiny = size + shift - shift
        rounded = add_half_step(bitcast(size, dtype=uint32), form.dropped)
        normal = bitcast(clear_low_bits(rounded, form.dropped), dtype=f32)
        near = where(size < 2.0**form.min_exponent, tiny, normal)
        near = where(near > form.top, form.beyond, near)
        if form.nan is None:
            return where(is_nan(x), constant(0.0, f32), copysign(near, x))
        return copysign(where(is_nan(x), NAN, near), x)

    return trace_rule(round_to_format, (f32,))


@cache
def build_rounding_encoder(dtype: DType) -> Function:
    """The function from any f32 to the code of the nearest value, ties to even.

    Above the least normal number the code is the upper bits of the f32, with another bias.
    """
    form = SMALL_FLOAT_FORMATS[dtype]
    step_exponent = form.min_exponent - form.digits + F32_MANTISSA_BITS
    step_bits = (step_exponent + F32_BIAS) << F32_MANTISSA_BITS
    rebias = (F32_BIAS - form.bias) << F32_MANTISSA_BITS

    def encode(x: Tensor) -> Tensor:
        bits = bitcast(x, dtype=uint32)
        size = bits & ((1 << F32_SIGN_BIT) - 1)
        sign = _move_sign(bits, form)
        low = bitcast(bitcast(size, dtype=f32) + 2.0**step_exponent, dtype=uint32) - step_bits
        code = add_half_step(size - rebias, form.dropped) >> form.dropped
        high = where(code > form.top_code, form.beyond_code, code)
        number = where(size < (form.min_exponent + F32_BIAS) << F32_MANTISSA_BITS, sign | low, sign | high)
        return where(is_nan(x), sign | (form.nan or 0), number)

    return trace_rule(encode, (f32,))
