"""Small float formats: exponent, mantissa and special codes of the types of eight bits or fewer (OCP Microscaling
2023).

In memory each value occupies a byte, as in ml_dtypes; in a register it is an f32 that holds its value.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.core.types import DType, fp4, fp6, fp6_e2m3, fp8_e4m3, fp8_e5m2

F32_MANTISSA_BITS, F32_BIAS = 23, 127  # of f32
NAN = float("nan")


@dataclass(frozen=True)
class SmallFloatFormat:
    """A format: bits of exponent and digits, the exponent's bias, its largest number, and what lies beyond.

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
        """The place of the sign bit."""
        return self.exponent + self.digits

    @property
    def beyond(self) -> float:
        """What a number too large becomes."""
        return float("inf") if self.infinity is not None else NAN if self.nan is not None else self.top


SMALL_FLOAT_FORMATS: dict[DType, SmallFloatFormat] = {
    fp8_e4m3: SmallFloatFormat(4, 3, 7, 448.0, nan=0x7F),
    fp8_e5m2: SmallFloatFormat(5, 2, 15, 57344.0, infinity=0x7C, nan=0x7E),
    fp6: SmallFloatFormat(3, 2, 3, 28.0),
    fp6_e2m3: SmallFloatFormat(2, 3, 1, 7.5),
    fp4: SmallFloatFormat(2, 1, 1, 6.0),
}
