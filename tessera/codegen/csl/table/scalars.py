"""Scalar expressions: how each pointwise op computes one element.

A float of eight bits or fewer is held as its code, and decoded to f32 for each computation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tessera.codegen.coverage import make_refusal_error
from tessera.codegen.csl.table import REFUSED
from tessera.codegen.csl.table.decomposition_emission import MATH_LIBRARY, format_function
from tessera.codegen.csl.text.context import CslContext
from tessera.codegen.csl.text.dsd import CSL_TYPES
from tessera.codegen.csl.text.statements import add_fault, make_unsupported_error
from tessera.core.types import (
    DType,
    TensorType,
    Type,
    bf16,
    bool_,
    f16,
    f32,
    int4,
    int8,
    int64,
    join_compute_types,
    uint8,
    uint32,
    uint64,
)
from tessera.ir.core import Node
from tessera.ir.rules import Op, Rules
from tessera.ir.tensor import Tensor
from tessera.lower.scalar_functions import single_precision
from tessera.lower.scalar_functions.decomposition import SHARED
from tessera.lower.scalar_functions.small_floats import (
    SMALL_FLOAT_FORMATS,
    build_decoder,
    build_rounding_encoder,
    decode_shift,
)
from tessera.ops.dialects.arith import divide
from tessera.ops.tensor import basic, bits, scalar_functions, shape
from tessera.ops.tensor import elementwise as e

assert single_precision  # fills the table of decompositions

# Floats of eight bits or fewer: held as their codes, and computed in f32.


def decode_small_float(element: CslContext, dtype: DType, text: str) -> str:
    """The value of a code."""
    name = f"decode_{dtype.name}"
    element.functions[name] = format_function(name, build_decoder(dtype), format_literal)
    return f"{name}(@as(u32, {text}) << {decode_shift(dtype)})"


def encode_small_float(element: CslContext, dtype: DType, text: str) -> str:
    """The code of a value."""
    name = f"encode_{dtype.name}"
    element.functions[name] = format_function(name, build_rounding_encoder(dtype), format_literal)
    return f"@as(i16, {name}({text}))"


# Expressions of one element: how each pointwise op is spelled.


# row(element, node, *operands) is the expression of the result, operands being expressions of their compute type.
pointwise_rows = Rules("csl scalar")

INFINITY_BITS = {math.inf: "0x7F800000", -math.inf: "0xFF800000"}

# Without f64, expm1 and log1p have rules of their own.
NEED_F64 = (scalar_functions.expm1, scalar_functions.log1p)
DECOMPOSITIONS = SHARED.without(lambda op, dtype: dtype != f32 or op in MATH_LIBRARY or op in NEED_F64)
DIVISIONS = {e.remainder, e.floor_divide}


@DECOMPOSITIONS(scalar_functions.expm1, f32)
def expm1_f32(x: Tensor) -> Tensor:
    """Kahan's form: the rounding error of exp(x) is divided out again."""
    u = e.exp(x)
    v = u - 1.0
    extreme = (v == -1.0) | (u - u != 0.0)
    return e.where(u == 1.0, x, e.where(extreme, v, v * divide(x, e.log(u))))


@DECOMPOSITIONS(scalar_functions.log1p, f32)
def log1p_f32(x: Tensor) -> Tensor:
    """Kahan's form: the rounding error of 1 + x is divided out again. Beyond it is infinity, or NaN below -1."""
    u = 1.0 + x
    found = e.log(u) * divide(x, u - 1.0)
    return e.where(u == 1.0, x, e.where(u - u != 0.0, x + e.sqrt(x), found))


def _declare_function(element: CslContext, op: Op) -> str:
    """The name of the function of f32 that a decomposition becomes."""
    name, function = f"{op.__name__}_f32", DECOMPOSITIONS.find(op, f32)
    assert function is not None
    element.functions[name] = format_function(name, function, format_literal)
    return name


def format_literal(value: Any, dtype: DType) -> str:
    """A constant of an element type: of floats of eight bits or fewer the code."""
    if dtype in SMALL_FLOAT_FORMATS:
        return str(int(np.asarray(value, np.float64).astype(dtype.numpy).view(np.uint8)))
    if not dtype.is_float:
        return str(int(value))
    number = float(np.asarray(value, np.float64).astype(dtype.numpy))
    if not math.isfinite(number):  # unlike a number with digits, these bits have a type
        bits = "0x7FC00000" if math.isnan(number) else INFINITY_BITS[number]
        return NARROWING_CASTS.get(dtype, "{0}").format(f"@bitcast(f32, @as(u32, {bits}))")
    digits = repr(number)
    mantissa, mark, exponent = digits.partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{mark}{exponent}"


def format_expression(element: CslContext, node: Node, operands: list[str], index: bool = False) -> str:
    """The result of a pointwise node: operands widened to its compute type, the result narrowed again.

    With `index` what is int64 counts places: 32 bits do.
    """
    row = pointwise_rows.get(node.op)
    if row is None:
        raise make_refusal_error("csl", node, REFUSED)
    wide = [format_widening(element, t.dtype, text) for t, text in zip(node.types, operands, strict=True)]  # type: ignore[union-attr]
    element.uses_index_type = index
    if narrows_operands(node):  # each operand to its own type, the result to that of all
        wide = [_round_to_f16(x) if _is_narrowed(t) else x for t, x in zip(node.types, wide, strict=True)]
    text = row(element, node, *wide)
    if narrows_operands(node) and node.out.type.dtype is f32:  # type: ignore[union-attr]
        computed = join_compute_types([t.compute for t in node.types])  # type: ignore[union-attr]
        text = _round_to_f16(text) if computed is f16 else text
    result = node.out.type
    assert isinstance(result, TensorType)
    if index and not result.dtype.is_float:
        return text.replace("i64", element.index_type)
    return format_narrowing(element, result.dtype, text)


def narrows_operands(node: Node) -> bool:
    """Whether a node computes with an f32 in f16, whose range is smaller: what is beyond it is infinite."""
    return node.op.numerics == "compute" and any(map(_is_narrowed, node.types))


def _is_narrowed(type: Type) -> bool:
    return isinstance(type, TensorType) and type.dtype is f32 and type.compute is f16


def _round_to_f16(text: str) -> str:
    return f"@as(f32, @as(f16, {text}))"


# What is computed in wider types than it is held in.
NARROWING_CASTS = {f16: "@as(f16, {0})", bf16: "@as(half, {0})", int8: "@as(i16, @as(i8, {0}))",
          uint8: "@as(i16, @as(u8, {0}))", int4: "@as(i16, (({0} + 8) & 15) - 8)"}  # fmt: skip


def format_widening(element: CslContext, dtype: DType, text: str) -> str:
    """An element as the type in which it is computed."""
    if dtype in SMALL_FLOAT_FORMATS:
        return decode_small_float(element, dtype, text)
    return f"@as(f32, {text})" if dtype.is_float and dtype.bits < 32 else text


def format_narrowing(element: CslContext, dtype: DType, text: str) -> str:
    """What was computed as an element."""
    if dtype in SMALL_FLOAT_FORMATS:
        return encode_small_float(element, dtype, text)
    return NARROWING_CASTS[dtype].format(text) if dtype in NARROWING_CASTS else text


def _make_infix_row(sign: str) -> Callable[..., str]:
    return lambda element, node, x, y: f"({x} {sign} {y})"


def _make_call_row(name: str) -> Callable[..., str]:
    def row(element: CslContext, node: Node, *operands: str) -> str:
        if not node.types[0].dtype.is_float:
            raise make_unsupported_error(node, "it is of integers")
        return f"math.{name}({', '.join(operands)})"

    return row


def _make_comparison_row(sign: str) -> Callable[..., str]:
    return lambda element, node, x, y: f"(if ({x} {sign} {y}) @as(i16, 1) else @as(i16, 0))"


for _op, _sign in (
    (e.add, "+"), (e.sub, "-"), (e.mul, "*"), (e.bitwise_and, "&"), (e.bitwise_or, "|"), (e.bitwise_xor, "^"),
):  # fmt: skip
    pointwise_rows(_op)(_make_infix_row(_sign))
for _op, _sign in (
    (e.less, "<"), (e.less_equal, "<="), (e.greater, ">"), (e.greater_equal, ">="), (e.equal, "=="),
    (e.not_equal, "!="),
):  # fmt: skip
    pointwise_rows(_op)(_make_comparison_row(_sign))
for _op, _name in MATH_LIBRARY.items():
    pointwise_rows(_op)(_make_call_row(_name))


@pointwise_rows(e.div)
def _(element, node, x, y):
    return f"({x} / {y})"


@pointwise_rows(e.rsqrt)
def _(element, node, x):
    return f"(1.0 / math.sqrt({x}))"


@pointwise_rows(e.neg)
def _(element, node, x):
    dtype = node.types[0].dtype
    return f"(@as({CSL_TYPES[dtype]}, 0) - {x})" if dtype.kind == "uint" else f"(-{x})"


@pointwise_rows(e.abs)
def _(element, node, x):
    dtype = node.types[0].dtype
    if dtype.is_float:
        return f"math.abs({x})"
    # The least number stays as it is (rule 2), which `math.abs` does not say.
    return f"(if ({x} < 0) -{x} else {x})" if dtype.kind == "int" else x


@pointwise_rows(*(DECOMPOSITIONS.ops() - DIVISIONS))
def _(element, node, *operands):
    return f"{_declare_function(element, node.op)}({', '.join(operands)})"


@pointwise_rows(e.maximum, e.minimum)
def _(element, node, x, y):
    sign = ">" if node.op is e.maximum else "<"
    if not node.types[0].dtype.is_float:
        return f"(if ({x} {sign} {y}) {x} else {y})"
    x, y = (y, x) if _find_number(x) is not None else (x, y)
    number = _find_number(y)
    if number or (number == 0.0 and node.op is e.maximum and y == "0.0"):
        return f"(if ({x} {sign} {y} or {x} != {x}) {x} else {y})"  # a NaN on either side stays
    name = f"{node.op.__name__}_f32"
    element.functions[name] = EXTREMUM_OF_FLOATS.format(name=name, sign=sign, join="&" if sign == ">" else "|")
    return f"{name}({x}, {y})"


def _find_number(text: str) -> float | None:
    """The number that an expression is, or None."""
    return float(text) if NUMBER.fullmatch(text) else None


NUMBER = re.compile(r"-?\d+\.\d*(e[-+]?\d+)?")
# Equal numbers have equal bits but for zeros, whose signs are joined; a NaN on either side stays.
EXTREMUM_OF_FLOATS = """fn {name}(x: f32, y: f32) f32 {{
  if (x == y) return @bitcast(f32, @bitcast(u32, x) {join} @bitcast(u32, y));
  return if (x {sign} y or x != x) x else y;
}}"""


@pointwise_rows(e.where)
def _(element, node, condition, x, y):
    return f"(if ({condition} != 0) {x} else {y})"


@pointwise_rows(e.remainder, e.floor_divide)
def _(element, node, x, y):
    dtype, name = node.types[0].dtype, node.op.__name__
    counted = element.index_type if element.uses_index_type else "i64"
    kind = "f32" if dtype.is_float else counted if dtype == int64 else LONG_UNSIGNED.get(dtype, "i32")
    helper = f"{name}_{kind}"
    if dtype.is_float:
        _declare_function(element, node.op)
    else:
        element.functions[helper] = INTEGER_DIVISION_HELPERS[name].replace("i32", kind)
    found = f"{helper}(@as({kind}, {x}), @as({kind}, {y}))"
    in_kind = dtype.is_float or element.uses_index_type or CSL_TYPES[dtype] == kind
    return found if in_kind else f"@as({CSL_TYPES[dtype]}, {found})"


# What does not fit a signed integer of 32 bits divides as what it is.
LONG_UNSIGNED = {uint32: "u32", uint64: "u64"}
# CSL rounds quotients toward zero, Tessera down; past a tensor's end a divisor may be 0.
INTEGER_DIVISION_HELPERS = {
    "remainder": """fn remainder_i32(x: i32, y: i32) i32 {
  if (y == 0) return 0;
  const r = x % y;
  return if (r != 0 and (r < 0) != (y < 0)) r + y else r;
}""",
    "floor_divide": """fn floor_divide_i32(x: i32, y: i32) i32 {
  if (y == 0) return 0;
  const q = x / y;
  return if (q * y != x and (x < 0) != (y < 0)) q - 1 else q;
}""",
}


@pointwise_rows(shape.check_index)
def _(element, node, x):
    size, known = node.attrs["size"], node.attrs
    kind = element.index_type if element.uses_index_type else "i64"
    low = -size if known["wrap"] else 0
    said = f"{known['what']} is outside axis {known['along']} of size {size}"
    add_fault(element, node, "bounds", said, f"from {low} to {size - 1}")
    element.functions[f"check_index_{kind}"] = INDEX_CHECK_HELPER.replace("KIND", kind)
    return f"check_index_{kind}(@as({kind}, {x}), {size}, {size if known['wrap'] else 0}, {len(element.faults)})"


INDEX_CHECK_HELPER = """fn check_index_KIND(x: KIND, size: KIND, end: KIND, place: i32) KIND {
  const found = if (x < 0) x + end else x;
  if (found >= 0 and found < size) return found;
  fail(place);
  return 0;
}"""


@pointwise_rows(e.bitwise_not)
def _(element, node, x):
    return f"(1 - {x})" if node.types[0].dtype == bool_ else f"(~{x})"


@pointwise_rows(e.shift_left, e.shift_right)
def _(element, node, x, y):
    kind, sign = CSL_TYPES[node.types[0].dtype], "<<" if node.op is e.shift_left else ">>"
    return f"(@as({kind}, {x}) {sign} @as(u16, {y}))"


@pointwise_rows(basic.cast)
def _(element, node, x):
    source, target = node.types[0].dtype, node.out.type.dtype
    if source == target or (source.is_float and target.is_float):
        return x
    if target == bool_:
        return f"(if ({x} != {'0.0' if source.is_float else '0'}) @as(i16, 1) else @as(i16, 0))"
    if source.is_float:
        kind = "i64" if target == int64 else LONG_UNSIGNED.get(target, "i32")
        element.functions[f"whole_{kind}"] = FLOAT_TO_INT_HELPERS[kind]
        limits = ml_dtypes.iinfo(target.numpy)
        low, high = (str(n) for n in (limits.min, limits.max))
        return f"@as({CSL_TYPES[target]}, whole_{kind}({x}, {low}, {high}))"
    if target is bf16 and source.bits > 16:
        kind = "u64" if source == uint64 else "i64"
        element.functions[f"round_to_odd_{kind}"] = INT_TO_ODD_HELPER.replace("KIND", kind).replace(
            "LEAST", "" if kind == "u64" else " or left < -16777216"
        )
        return f"round_to_odd_{kind}(@as({kind}, {x}))"
    return f"@as({CSL_TYPES[target] if not target.is_float else 'f32'}, {x})"


@pointwise_rows(bits.bitcast_elements)
def _(element, node, x):
    return f"@bitcast({CSL_TYPES[node.out.type.dtype]}, {x})"


# An integer as f32, rounded to odd: what is dropped stays in the last bit, so that a second rounding is exact.
INT_TO_ODD_HELPER = """fn round_to_odd_KIND(x: KIND) f32 {
  var left: KIND = x;
  var scale: f32 = 1.0;
  while (left >= 16777216LEAST) {
    left = (left >> 1) | (left & 1);
    scale *= 2.0;
  }
  return @as(f32, left) * scale;
}"""
# Toward zero, and what lies beyond a type at its end; NaN is 0.
_FLOAT_TO_INT = """fn whole_i32(x: f32, low: i32, high: i32) i32 {
  if (x != x) return 0;
  if (x >= LIMIT) return high;
  if (x <= -LIMIT) return low;
  const found = @as(i32, x);
  return if (found < low) low else if (found > high) high else found;
}"""
_FLOAT_TO_UNSIGNED = """fn whole_KIND(x: f32, low: KIND, high: KIND) KIND {
  if (x != x or x <= 0.0) return 0;
  return if (x >= LIMIT) high else @as(KIND, x);
}"""
FLOAT_TO_INT_HELPERS = {
    "i32": _FLOAT_TO_INT.replace("LIMIT", "2147483648.0"),
    "i64": _FLOAT_TO_INT.replace("LIMIT", "9223372036854775808.0").replace("i32", "i64"),
    "u32": _FLOAT_TO_UNSIGNED.replace("LIMIT", "4294967296.0").replace("KIND", "u32"),
    "u64": _FLOAT_TO_UNSIGNED.replace("LIMIT", "18446744073709551616.0").replace("KIND", "u64"),
}
