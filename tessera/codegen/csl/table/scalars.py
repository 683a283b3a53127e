"""Scalar expressions: how each pointwise op computes one element.

A float of eight bits or fewer is held as its code, and decoded to f32 for each computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tessera.codegen.coverage import make_refusal_error
from tessera.codegen.csl.table.refusals import REFUSED
from tessera.codegen.csl.text.context import CslContext
from tessera.codegen.csl.text.dsd import CSL_TYPES
from tessera.codegen.csl.text.faults import make_unsupported_error
from tessera.core.types import DType, TensorType, bf16, bool_, f16, int4, int8, int64, uint8
from tessera.ir.core import Node
from tessera.ir.rules import Rules
from tessera.lower.scalar_functions.small_floats import (
    F32_BIAS,
    F32_MANTISSA_BITS,
    SMALL_FLOAT_FORMATS,
    SmallFloatFormat,
)
from tessera.ops.tensor import basic, scalar_functions
from tessera.ops.tensor import elementwise as e

# Floats of eight bits or fewer: held as their codes, and computed in f32.


DECODE_HELPER = """fn widen_{name}(code: i16) f32 {{
  const size: u32 = @as(u32, code & {magnitude});
{special}  const value: f32 = @bitcast(f32, size << {dropped}) * {scale};
  return if ((code & {sign}) != 0) -value else value;
}}"""
DECODE_SPECIAL = """  if (size >= {first}) return @bitcast(f32, @as(u32, {value}) | (@as(u32, code & {sign}) << {up}));
"""
# To nearest, ties to even. Below the least normal number steps are equal: adding a number whose last digit is one step
# rounds to them; above it the code is the upper bits of the f32, with another bias.
ENCODE_HELPER = """fn narrow_{name}(x: f32) i16 {{
  const bits: u32 = @bitcast(u32, x);
  const size: u32 = bits & 0x7FFFFFFF;
  const sign: i16 = if (bits == size) 0 else {sign};
  if (x != x) return sign | {nan};
  if (size < {least}) {{
    return sign | @as(i16, @bitcast(u32, @bitcast(f32, size) + {step}) - {step_bits});
  }}
  const code: u32 = (size - {rebias} + {half} + ((size >> {dropped}) & 1)) >> {dropped};
  return sign | (if (code > {top}) {beyond} else @as(i16, code));
}}"""


def decode_small_float(element: CslContext, dtype: DType, text: str) -> str:
    """The value of a code."""
    form, name = SMALL_FLOAT_FORMATS[dtype], f"widen_{dtype.name}"
    sign, scale = 1 << form.sign, float(2.0 ** (F32_BIAS - form.bias))
    element.functions[name] = DECODE_HELPER.format(
        name=dtype.name,
        magnitude=sign - 1,
        sign=sign,
        dropped=F32_MANTISSA_BITS - form.digits,
        scale=_format_number(scale),
        special="".join(_format_specials(form, sign)),
    )
    return f"{name}({text})"


def _format_specials(form: SmallFloatFormat, sign: int) -> list[str]:
    """What stands for no number of its digits: NaN first, which has the largest codes, then infinity."""
    found = [(form.nan, "0x7FC00000")] if form.nan is not None else []
    if form.infinity is not None:
        found = [(form.infinity + 1, "0x7FC00000"), (form.infinity, "0x7F800000")]
    return [DECODE_SPECIAL.format(first=n, value=v, sign=sign, up=31 - form.sign) for n, v in found]


def encode_small_float(element: CslContext, dtype: DType, text: str) -> str:
    """The code of a value."""
    form, name = SMALL_FLOAT_FORMATS[dtype], f"narrow_{dtype.name}"
    dropped, least = F32_MANTISSA_BITS - form.digits, 1 - form.bias
    place = least - form.digits + F32_MANTISSA_BITS
    element.functions[name] = ENCODE_HELPER.format(
        name=dtype.name,
        sign=1 << form.sign,
        nan=form.nan or 0,
        least=hex((least + F32_BIAS) << F32_MANTISSA_BITS),
        step=_format_number(2.0**place),
        step_bits=hex((place + F32_BIAS) << F32_MANTISSA_BITS),
        dropped=dropped,
        rebias=hex((F32_BIAS - form.bias) << F32_MANTISSA_BITS),
        half=(1 << (dropped - 1)) - 1,
        top=_find_max_finite_code(form),
        beyond=_find_overflow_code(form),
    )
    return f"{name}({text})"


def _find_max_finite_code(form: SmallFloatFormat) -> int:
    """The code of the largest number."""
    if form.infinity is not None:
        return form.infinity - 1
    return (1 << form.sign) - 1 if form.nan is None else form.nan - 1


def _find_overflow_code(form: SmallFloatFormat) -> int:
    """The code of what lies beyond it."""
    found = form.infinity if form.infinity is not None else form.nan
    return _find_max_finite_code(form) if found is None else found


def _format_number(value: float) -> str:
    mantissa, mark, exponent = repr(value).partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{mark}{exponent}"


# Expressions of one element: how each pointwise op is spelled.


# row(element, node, *operands) is the expression of the result, operands being expressions of their compute type.
pointwise_rows = Rules("csl scalar")

INFINITY_BITS = {math.inf: "0x7F800000", -math.inf: "0xFF800000"}

# erf by the fit of N. Juffa: 1 - exp(polynomial) beyond 0.9277, an odd polynomial below.
ERF_HELPER = """fn erf(x: f32) f32 {
  const a = math.abs(x);
  const t: f32 = if (a > 4.0) 4.0 else a;
  const s = t * t;
  if (a > 0.927734375) {
    const u: f32 = (-1.72853470e-5 * t + 3.83197126e-4) * s + (-3.88396438e-3 * t + 2.42546219e-2);
    const p: f32 = ((u * t - 1.06777877e-1) * t - 6.34846687e-1) * t - 1.28717512e-1;
    const far: f32 = 1.0 - math.exp(p * t - t);
    return if (x < 0.0) -far else far;
  }
  const q: f32 = ((((-5.96761703e-4 * s + 4.99119423e-3) * s - 2.67681349e-2) * s + 1.12819925e-1) * s
    - 3.76125336e-1) * s + 1.28379166e-1;
  return q * x + x;
}"""

# Kahan's way: what rounding takes from 1 + x, or from exp(x), is given back by the quotient.
MATH_HELPERS = {
    "erf": ERF_HELPER,
    "expm1": """fn expm1(x: f32) f32 {
  const u: f32 = math.exp(x);
  if (u == 1.0) return x;
  const v: f32 = u - 1.0;
  if (v == -1.0 or u - u != 0.0) return v;
  return v * (x / math.log(u));
}""",
    "log1p": """fn log1p(x: f32) f32 {
  const u: f32 = 1.0 + x;
  if (u == 1.0) return x;
  if (u - u != 0.0) return x + math.sqrt(x);  // infinity, or NaN of what is below -1
  return math.log(u) * (x / (u - 1.0));
}""",
}


def format_literal(value: Any, dtype: DType) -> str:
    """A constant of an element type: of floats of eight bits or fewer the code."""
    if dtype in SMALL_FLOAT_FORMATS:
        return str(int(np.asarray(value, np.float64).astype(dtype.numpy).view(np.uint8)))
    if not dtype.is_float:
        return str(int(value))
    number = float(np.asarray(value, np.float64).astype(dtype.numpy))
    if math.isnan(number):
        return "@bitcast(f32, @as(u32, 0x7FC00000))"
    if math.isinf(number):
        return f"@bitcast(f32, @as(u32, {INFINITY_BITS[number]}))"
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
    text = row(element, node, *wide)
    result = node.out.type
    assert isinstance(result, TensorType)
    if index and not result.dtype.is_float:
        return text.replace("i64", element.index_type)
    return format_narrowing(element, result.dtype, text)


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
for _op, _name in (
    (e.exp, "exp"), (e.log, "log"), (e.sqrt, "sqrt"), (e.tanh, "tanh"), (e.sin, "sin"), (e.cos, "cos"),
    (e.floor, "floor"), (e.ceil, "ceil"), (e.exp2, "exp2"), (e.log2, "log2"), (e.round, "round"),
    (e.pow, "pow"), (scalar_functions.atan, "atan"),
):  # fmt: skip
    pointwise_rows(_op)(_make_call_row(_name))


@pointwise_rows(e.div)
def _(element, node, x, y):
    return f"({x} / {y})"


@pointwise_rows(e.rsqrt)
def _(element, node, x):
    return f"(1.0 / math.sqrt({x}))"


@pointwise_rows(e.neg)
def _(element, node, x):
    return f"(-{x})"


@pointwise_rows(e.abs)
def _(element, node, x):
    return f"math.abs({x})"


@pointwise_rows(e.erf, scalar_functions.expm1, scalar_functions.log1p)
def _(element, node, x):
    name = node.op.__name__
    element.functions[name] = MATH_HELPERS[name]
    return f"{name}({x})"


@pointwise_rows(e.maximum, e.minimum)
def _(element, node, x, y):
    sign = ">" if node.op is e.maximum else "<"
    if not node.types[0].dtype.is_float:
        return f"(if ({x} {sign} {y}) {x} else {y})"
    return f"(if ({x} {sign} {y} or {x} != {x}) {x} else {y})"  # a NaN on either side stays


@pointwise_rows(e.where)
def _(element, node, condition, x, y):
    return f"(if ({condition} != 0) {x} else {y})"


@pointwise_rows(e.remainder, e.floor_divide)
def _(element, node, x, y):
    dtype, name = node.types[0].dtype, node.op.__name__
    counted = element.index_type if element.uses_index_type else "i64"
    kind = "f32" if dtype.is_float else counted if dtype == int64 else "i32"
    helper = f"{name}_{kind}"
    table = FLOAT_DIVISION_HELPERS if dtype.is_float else INTEGER_DIVISION_HELPERS
    for needed in ("remainder_f32", helper) if dtype.is_float else (helper,):
        element.functions[needed] = table[needed.rpartition("_")[0]].replace("i32", kind)
    found = f"{helper}(@as({kind}, {x}), @as({kind}, {y}))"
    return found if element.uses_index_type or CSL_TYPES[dtype] in (kind, "f16", "half") else f"@as(i16, {found})"


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
# As NumPy has it: the quotient is of what the remainder leaves, so that the two agree; zeros keep the divisor's sign.
FLOAT_DIVISION_HELPERS = {
    "remainder": """fn remainder_f32(x: f32, y: f32) f32 {
  const r: f32 = math.fmod(x, y);
  if (r == 0.0) return if (y < 0.0) -0.0 else 0.0;
  return if ((r < 0.0) != (y < 0.0)) r + y else r;
}""",
    "floor_divide": """fn floor_divide_f32(x: f32, y: f32) f32 {
  if (y == 0.0) return x / y;
  const q: f32 = (x - remainder_f32(x, y)) / y;
  if (q == 0.0) return x / y * 0.0;
  const whole: f32 = math.floor(q);
  return if (q - whole > 0.5) whole + 1.0 else whole;
}""",
}


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
        kind = "i64" if target == int64 else "i32"
        element.functions[f"whole_{kind}"] = FLOAT_TO_INT_HELPERS[kind]
        limits = ml_dtypes.iinfo(target.numpy)
        low, high = (str(n) for n in (limits.min, limits.max))
        return f"@as({CSL_TYPES[target]}, whole_{kind}({x}, {low}, {high}))"
    return f"@as({CSL_TYPES[target] if not target.is_float else 'f32'}, {x})"


# Toward zero, and what lies beyond a type at its end; NaN is 0.
_FLOAT_TO_INT = """fn whole_i32(x: f32, low: i32, high: i32) i32 {
  if (x != x) return 0;
  if (x >= LIMIT) return high;
  if (x <= -LIMIT) return low;
  const found = @as(i32, x);
  return if (found < low) low else if (found > high) high else found;
}"""
FLOAT_TO_INT_HELPERS = {"i32": _FLOAT_TO_INT.replace("LIMIT", "2147483648.0"),
         "i64": _FLOAT_TO_INT.replace("LIMIT", "9223372036854775808.0").replace("i32", "i64")}  # fmt: skip
