"""Scalar rows: the emission table of pointwise ops, and the context that each row emits one element's result in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tessera.codegen.ptx.text.builder import PtxBuilder, literal, ptx_type, register_class
from tessera.core.types import DType, Policy, int4, int8, int16, uint8, uint16
from tessera.ir.rules import Rules

# row(context, *registers) gives the register of one element's result.
emit = Rules("ptx emission")
ScalarRow = Callable[..., str]

INTEGER_LIMITS = {int4: (-8, 7), int8: (-128, 127), int16: (-32768, 32767), uint8: (0, 255), uint16: (0, 65535)}


@dataclass(frozen=True)
class ScalarContext:
    """What a row needs besides operands: where lines go, the type they are computed in, and the result's, which may
    have a policy."""

    text: PtxBuilder
    dtype: DType
    out: DType
    policy: Policy | None = None

    @property
    def word(self) -> str:
        """The type word of instructions."""
        return ptx_type(self.dtype)

    @property
    def kind(self) -> str:
        """f, s, u or b: float, signed, unsigned, bool."""
        return {"float": "f", "int": "s", "uint": "u", "bool": "b"}[self.dtype.kind]

    def do(self, instruction: str, *operands: object) -> str:
        """An instruction on this type; its result's register."""
        return self.text.let(instruction, register_class(self.dtype), *operands)

    def number(self, value: float) -> str:
        """A constant of this type."""
        return literal(self.word, value)

    def wrap(self, x: str) -> str:
        """An integer brought back into its type's range."""
        return wrap_integer(self.text, self.dtype, x)


def wrap_integer(text: PtxBuilder, dtype: DType, x: str) -> str:
    """The low bits of 32 as the narrow integer that they are."""
    if dtype not in INTEGER_LIMITS:
        return x
    return text.let(f"bfe.{'u' if dtype.kind == 'uint' else 's'}32", "b32", x, 0, dtype.bits)
