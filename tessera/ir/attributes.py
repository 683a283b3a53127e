"""How types, attributes and locations are spelled in text: MLIR's own forms, opaque ones where it has none."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

from tessera.errors import UNKNOWN, Location
from tessera.ir.core import Attrs
from tessera.shapes import Dim, Size
from tessera.types import DTYPES, DType, Policy, RefType, TensorType, Type

# The element types that MLIR and its readers have built in; the others become opaque types of ours.
_BUILTIN = frozenset(("f64", "f32", "f16", "bf16", "i4", "i8", "i16", "i32", "i64", "ui8", "i1"))
# What stands for itself in a string: not " or \, nor what moves the line or the order of writing.
_PLAIN = re.compile(r"[ !#-\[\]-~\xa0-\u2027\u2030-\ud7ff\ue000-\U0010ffff]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.$]*")
_I64 = range(-(1 << 63), 1 << 63)


def print_string(text: str) -> str:
    """A string in quotes; the bytes of what cannot stand for itself as two hex digits each."""
    if _PLAIN.fullmatch(text):
        return f'"{text}"'
    return '"' + "".join(c if _PLAIN.fullmatch(c) else _escape(c) for c in text) + '"'


def _escape(character: str) -> str:
    return "".join(f"\\{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def print_element(dtype: DType) -> str:
    """An element type: `f32`, `!ts.f8E4M3FN`."""
    return dtype.mlir if dtype.mlir in _BUILTIN else f"!ts.{dtype.mlir}"


ELEMENTS: Mapping[str, DType] = {print_element(t): t for t in DTYPES}


def print_type(type: Type) -> str:
    """The type of a value: `tensor<?x4xf32, {dims = ["B"]}>`, `!tile.ref<4xf32, shared>`."""
    body = "".join(f"{'?' if isinstance(s, Dim) else int(s)}x" for s in type.shape) + print_element(type.dtype)
    extra = _encoding(type.shape, type.dtype, type.policy)
    tail = f", {print_dictionary(extra)}" if extra else ""
    return f"!tile.ref<{body}, {type.space}{tail}>" if isinstance(type, RefType) else f"tensor<{body}{tail}>"


def _encoding(shape: tuple[Size, ...], dtype: DType, policy: Policy | None) -> dict[str, Any]:
    """What MLIR's shaped types have no place for: the names behind each `?`, and the policy."""
    dims = tuple(repr(s) for s in shape if isinstance(s, Dim))
    return ({"dims": dims} if dims else {}) | (policy_fields(policy, dtype) if policy else {})


def policy_fields(policy: Policy, dtype: DType | None = None) -> dict[str, Any]:
    """The clauses of a policy; its storage too where `dtype` does not tell it, or where it has no clause."""
    clauses = policy.clauses()
    return clauses if clauses and policy.storage == dtype else {"storage": policy.storage, **clauses}


def print_location(loc: Location) -> str:
    """A place: `loc("f.py":12:4)`, with the end column (if known) as a name: `loc("to 9"("f.py":12:4))`."""
    if loc == UNKNOWN:
        return "loc(unknown)"
    start = f"{print_string(loc.file)}:{loc.line}:{loc.column}"
    return f'loc("to {loc.end_column}"({start}))' if loc.end_column else f"loc({start})"


def print_dictionary(items: Mapping[str, Any]) -> str:
    """Named attributes, in the order of their names: `{axis = -1 : i64}`."""
    return "{" + ", ".join(f"{_name(k)} = {print_attribute(v)}" for k, v in sorted(items.items())) + "}"


def _name(name: str) -> str:
    return name if _NAME.fullmatch(name) else print_string(name)


def print_attribute(value: Any) -> str:
    """One attribute; `printable` tells which values have a spelling."""
    return _PRINT[type(value)](value)


def printable(value: Any) -> bool:
    """Whether text can hold this attribute exactly."""
    if isinstance(value, Attrs):
        return all(isinstance(k, str) and k and printable(v) for k, v in value.items())
    return all(printable(v) for v in value) if isinstance(value, tuple) else type(value) in _PRINT


def _print_int(value: int) -> str:
    return f"{value} : i64" if value in _I64 else f"#ts.int<{value}>"


def _print_float(value: float) -> str:
    if not math.isfinite(value):
        return f"0x{struct.pack('>d', value).hex().upper()} : f64"
    text = repr(value)
    return f"{text if '.' in text else text.replace('e', '.0e')} : f64"  # MLIR wants a point


def _print_place(loc: Location) -> str:
    return f"#ts.loc<{print_string(loc.file)}:{loc.line}:{loc.column}:{loc.end_column}>"


_PRINT: dict[type, Callable[[Any], str]] = {
    bool: lambda value: "true" if value else "false",
    int: _print_int,
    float: _print_float,
    str: print_string,
    type(None): lambda value: "unit",
    tuple: lambda value: f"[{', '.join(print_attribute(v) for v in value)}]",
    Attrs: print_dictionary,
    DType: print_element,
    TensorType: print_type,
    RefType: print_type,
    Dim: lambda value: f"#ts.dim<{print_string(repr(value))}>",
    Policy: lambda value: f"#ts.policy<{print_dictionary(policy_fields(value))}>",
    Location: _print_place,
}
