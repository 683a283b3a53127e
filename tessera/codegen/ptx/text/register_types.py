"""Register types: the PTX register class and the instruction type of each element type."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from tessera.core.errors import UnsupportedOpError
from tessera.core.types import (
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
from tessera.ops.tensor.basic import full

# In registers a narrow float is an f32 with the same value, and a narrow integer 32 bits with the same value: ops
# compute in 32 bits, then round or wrap the result to the narrow type.
PTX_TYPES: dict[DType, str] = {
    f64: "f64", f32: "f32", tf32: "f32", f16: "f32", bf16: "f32",
    int64: "s64", int32: "s32", int16: "s32", int8: "s32", int4: "s32", bool_: "pred",
    uint64: "u64", uint32: "u32", uint16: "u32", uint8: "u32",
    **dict.fromkeys((fp8_e4m3, fp8_e5m2, fp6, fp6_e2m3, fp4), "f32"),
}  # fmt: skip
REGISTER_CLASSES = {"f64": "f64", "f32": "f32", "s64": "b64", "u64": "b64", "b64": "b64", "pred": "pred"}
REGISTER_PREFIXES = {"pred": "%p", "b16": "%h", "b32": "%r", "b64": "%x", "f32": "%f", "f64": "%d"}
REGISTER_BITS = {"b16": 16, "b32": 32, "b64": 64, "f32": 32, "f64": 64}
SMALL_FLOATS = (fp8_e4m3, fp8_e5m2, fp6, fp6_e2m3, fp4)
NARROW_FLOATS = (tf32, f16, bf16, *SMALL_FLOATS)


def ptx_type(dtype: DType) -> str:
    """The PTX type of instructions on elements of a type.

    Raises:
        UnsupportedOpError: the target does not support the type.
    """
    if dtype not in PTX_TYPES:
        raise UnsupportedOpError(
            f"the target ptx has no element type {dtype}", expected=", ".join(map(str, PTX_TYPES)),
            suggestion="cast to ts.f32 or ts.bf16 first",
        )  # fmt: skip
    return PTX_TYPES[dtype]


def register_class_of(word: str) -> str:
    """The register class for a PTX type."""
    return REGISTER_CLASSES.get(word, "b16" if word.endswith("16") else "b32")


def register_class(dtype: DType) -> str:
    """The register class for elements of a type."""
    return register_class_of(ptx_type(dtype))


def element_bytes(dtype: DType) -> int:
    """The bytes of an element in memory."""
    ptx_type(dtype)
    return dtype.numpy.itemsize


def literal(word: str, value: Any) -> str:
    """A number as an immediate operand of a PTX type.

    >>> literal("f32", 1.0), literal("s32", -3)
    ('0f3F800000', '-3')
    """
    if word == "f32":
        number = np.float32(value)
        return "0f7FC00000" if np.isnan(number) else f"0f{struct.unpack('<I', struct.pack('<f', number))[0]:08X}"
    if word == "f64":
        number = float(value)
        return (
            "0d7FF8000000000000" if number != number else f"0d{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"
        )
    return str(int(value))


def typed_literal(value: Any, dtype: DType) -> str:
    """A number, rounded to an element type, as an immediate operand."""
    number = full.ref(shape=(), value=value, dtype=dtype)
    return literal(ptx_type(dtype), float(number) if dtype.is_float else int(number))


def is_immediate(operand: str) -> bool:
    """Whether an operand is an immediate rather than a register."""
    return not operand.startswith("%")
