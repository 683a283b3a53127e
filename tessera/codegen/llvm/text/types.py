"""Element types in LLVM IR: in registers, in memory, and as literals."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.errors import UnsupportedOpError
from tessera.core.types import (  # fmt: skip
    DType,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    fp4,
    fp6,
    fp6_e2m3,
    fp8_e4m3,
    fp8_e5m2,
    int4,
    int8,
    int16,
    int32,
    int64,
    tf32,
    uint8,
    uint16,
    uint32,
    uint64,
)

SMALL_FLOATS = (fp8_e4m3, fp8_e5m2, fp6, fp6_e2m3, fp4)
# In registers a narrow float is a `float` that holds one of its values exactly: each op computes in f32 anyway, and
# rounding to the narrow format in place saves a conversion back.
REGISTER_ELEMENTS: dict[DType, str] = {
    f64: "double", f32: "float", tf32: "float", f16: "float", bf16: "float",
    int64: "i64", int32: "i32", int16: "i16", int8: "i8", bool_: "i1",
    uint64: "i64", uint32: "i32", uint16: "i16", uint8: "i8", int4: "i16", **dict.fromkeys(SMALL_FLOATS, "float"),
}  # fmt: skip
MEMORY_ELEMENTS: dict[DType, str] = {
    **REGISTER_ELEMENTS,
    f16: "half",
    bf16: "i16",
    bool_: "i8",
    int4: "i8",
    **dict.fromkeys(SMALL_FLOATS, "i8"),
}
ELEMENT_BYTES = {"double": 8, "float": 4, "half": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "i1": 1, "ptr": 8}
NARROW_FLOATS = (tf32, f16, bf16, *SMALL_FLOATS)
_SUFFIX = {"double": "f64", "float": "f32", "half": "f16", "ptr": "p0"}


@dataclass(frozen=True)
class RegisterType:
    """A register type: a scalar, or a vector of `width` elements."""

    element: str
    width: int = 1

    def __str__(self) -> str:
        return self.element if self.width == 1 else f"<{self.width} x {self.element}>"

    @property
    def suffix(self) -> str:
        """The suffix in intrinsic names: f32, v16f32."""
        short = _SUFFIX.get(self.element, self.element)
        return short if self.width == 1 else f"v{self.width}{short}"

    @property
    def is_float(self) -> bool:
        """Whether the elements are floats."""
        return self.element in ("double", "float", "half")

    @property
    def bits(self) -> int:
        """The width of an element in bits."""
        return 1 if self.element == "i1" else ELEMENT_BYTES[self.element] * 8

    def of(self, element: str) -> RegisterType:
        """The type with another element type and the same width."""
        return RegisterType(element, self.width)

    @property
    def integer(self) -> RegisterType:
        """The integer type with elements of the same size."""
        return self.of(f"i{self.bits}")

    @property
    def truth(self) -> RegisterType:
        """The type of a comparison's result."""
        return self.of("i1")

    def const(self, value: Any) -> str:
        """A constant, splat over the lanes."""
        text = format_literal(self.element, value)
        return text if self.width == 1 else f"splat ({self.element} {text})"


def format_literal(element: str, value: Any) -> str:
    """A scalar constant."""
    if element == "i1":
        return "true" if value else "false"
    if not ELEMENT_BYTES[element] or element[0] == "i":
        return str(int(value))
    number = float(np.float32(value)) if element == "float" else float(value)
    if math.isnan(number):
        return "0x7FF8000000000000"
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


def get_register_type(dtype: DType, width: int = 1) -> RegisterType:
    """The register type of elements.

    Raises:
        UnsupportedOpError: the target has no registers for this element type.
    """
    if dtype not in REGISTER_ELEMENTS:
        raise UnsupportedOpError(
            f"the target llvm has no element type {dtype}", expected=", ".join(map(str, REGISTER_ELEMENTS)),
            suggestion="cast to ts.f32 or ts.bf16 first",
        )  # fmt: skip
    return RegisterType(REGISTER_ELEMENTS[dtype], width)


def get_memory_type(dtype: DType, width: int = 1) -> RegisterType:
    """The type of elements in memory."""
    get_register_type(dtype)
    return RegisterType(MEMORY_ELEMENTS[dtype], width)


def copy_register(t: RegisterType, d: str, x: str) -> str:
    """The instruction that gives a value another name."""
    return f"{d} = bitcast {t} {x} to {t}"


def get_element_bytes(dtype: DType) -> int:
    """The size of an element in memory, in bytes."""
    return ELEMENT_BYTES[get_memory_type(dtype).element]
