"""Small float codec: the types of eight bits or fewer (OCP Microscaling 2023), decoded, encoded and rounded in IR.

In memory each value occupies a byte, as in ml_dtypes: sign, exponent, mantissa. Codes are uint32 here, values f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tessera.core.types import DType, f32, fp4, fp6, fp6_e2m3, fp8_e4m3, fp8_e5m2, uint32
from tessera.ir.core import Function
from tessera.ir.tensor import Tensor
from tessera.lower.scalar_functions.decomposition import constant, trace_rule
from tessera.lower.scalar_functions.rounding import F32_MANTISSA_BITS, NAN, add_half_step, clear_low_bits
from tessera.ops.dialects.arith import bitcast, copysign, is_nan
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.elementwise import where

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
