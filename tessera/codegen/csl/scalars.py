"""Expressions of one element: how each pointwise op is spelled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tessera.codegen.csl.element import Element, unsupported
from tessera.codegen.csl.small import narrowed, widened
from tessera.codegen.csl.views import SPELLING
from tessera.codegen.small_floats import FORMS
from tessera.ir.core import Node
from tessera.op import Rules
from tessera.ops import basic, functions
from tessera.ops import elementwise as e
from tessera.types import DType, TensorType, bf16, bool_, f16, int4, int8, int64, uint8

# row(element, node, *operands) is the expression of the result, operands being expressions of their compute type.
rows = Rules("csl scalar")

BITS = {math.inf: "0x7F800000", -math.inf: "0xFF800000"}

# erf by the fit of N. Juffa: 1 - exp(polynomial) beyond 0.9277, an odd polynomial below.
ERF = """fn erf(x: f32) f32 {
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
HELPERS = {
    "erf": ERF,
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


def literal(value: Any, dtype: DType) -> str:
    """A constant of an element type: of floats of eight bits or fewer the code."""
    if dtype in FORMS:
        return str(int(np.asarray(value, np.float64).astype(dtype.numpy).view(np.uint8)))
    if not dtype.is_float:
        return str(int(value))
    number = float(np.asarray(value, np.float64).astype(dtype.numpy))
    if math.isnan(number):
        return "@bitcast(f32, @as(u32, 0x7FC00000))"
    if math.isinf(number):
        return f"@bitcast(f32, @as(u32, {BITS[number]}))"
    digits = repr(number)
    mantissa, mark, exponent = digits.partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{mark}{exponent}"


def expression(element: Element, node: Node, operands: list[str], index: bool = False) -> str:
    """The result of a pointwise node: operands widened to its compute type, the result narrowed again.

    With `index` what is int64 counts places: 32 bits do.
    """
    row = rows.get(node.op)
    if row is None:
        raise unsupported(node, "there is no row for it")
    wide = [widen(element, t.dtype, text) for t, text in zip(node.types, operands, strict=True)]  # type: ignore[union-attr]
    element.indexing = index
    text = row(element, node, *wide)
    result = node.out.type
    assert isinstance(result, TensorType)
    if index and not result.dtype.is_float:
        return text.replace("i64", element.counting)
    return narrow(element, result.dtype, text)


# What is computed in wider types than it is held in.
NARROW = {f16: "@as(f16, {0})", bf16: "@as(half, {0})", int8: "@as(i16, @as(i8, {0}))",
          uint8: "@as(i16, @as(u8, {0}))", int4: "@as(i16, (({0} + 8) & 15) - 8)"}  # fmt: skip


def widen(element: Element, dtype: DType, text: str) -> str:
    """An element as the type in which it is computed."""
    if dtype in FORMS:
        return widened(element, dtype, text)
    return f"@as(f32, {text})" if dtype.is_float and dtype.bits < 32 else text


def narrow(element: Element, dtype: DType, text: str) -> str:
    """What was computed as an element."""
    if dtype in FORMS:
        return narrowed(element, dtype, text)
    return NARROW[dtype].format(text) if dtype in NARROW else text


def _between(sign: str) -> Callable[..., str]:
    return lambda element, node, x, y: f"({x} {sign} {y})"


def _call(name: str) -> Callable[..., str]:
    def row(element: Element, node: Node, *operands: str) -> str:
        if not node.types[0].dtype.is_float:
            raise unsupported(node, "it is of integers")
        return f"math.{name}({', '.join(operands)})"

    return row


def _truth(sign: str) -> Callable[..., str]:
    return lambda element, node, x, y: f"(if ({x} {sign} {y}) @as(i16, 1) else @as(i16, 0))"


for _op, _sign in (
    (e.add, "+"), (e.sub, "-"), (e.mul, "*"), (e.bitwise_and, "&"), (e.bitwise_or, "|"), (e.bitwise_xor, "^"),
):  # fmt: skip
    rows(_op)(_between(_sign))
for _op, _sign in (
    (e.less, "<"), (e.less_equal, "<="), (e.greater, ">"), (e.greater_equal, ">="), (e.equal, "=="),
    (e.not_equal, "!="),
):  # fmt: skip
    rows(_op)(_truth(_sign))
for _op, _name in (
    (e.exp, "exp"), (e.log, "log"), (e.sqrt, "sqrt"), (e.tanh, "tanh"), (e.sin, "sin"), (e.cos, "cos"),
    (e.floor, "floor"), (e.ceil, "ceil"), (e.exp2, "exp2"), (e.log2, "log2"), (e.round, "round"),
    (e.pow, "pow"), (functions.atan, "atan"),
):  # fmt: skip
    rows(_op)(_call(_name))


@rows(e.div)
def _(element, node, x, y):
    return f"({x} / {y})"


@rows(e.rsqrt)
def _(element, node, x):
    return f"(1.0 / math.sqrt({x}))"


@rows(e.neg)
def _(element, node, x):
    return f"(-{x})"


@rows(e.abs)
def _(element, node, x):
    return f"math.abs({x})"


@rows(e.erf, functions.expm1, functions.log1p)
def _(element, node, x):
    name = node.op.__name__
    element.functions[name] = HELPERS[name]
    return f"{name}({x})"


@rows(e.maximum, e.minimum)
def _(element, node, x, y):
    sign = ">" if node.op is e.maximum else "<"
    if not node.types[0].dtype.is_float:
        return f"(if ({x} {sign} {y}) {x} else {y})"
    return f"(if ({x} {sign} {y} or {x} != {x}) {x} else {y})"  # a NaN on either side stays


@rows(e.where)
def _(element, node, condition, x, y):
    return f"(if ({condition} != 0) {x} else {y})"


@rows(e.remainder, e.floor_divide)
def _(element, node, x, y):
    dtype, name = node.types[0].dtype, node.op.__name__
    counted = element.counting if element.indexing else "i64"
    kind = "f32" if dtype.is_float else counted if dtype == int64 else "i32"
    helper = f"{name}_{kind}"
    table = DIVIDE_FLOATS if dtype.is_float else DIVIDE
    for needed in ("remainder_f32", helper) if dtype.is_float else (helper,):
        element.functions[needed] = table[needed.rpartition("_")[0]].replace("i32", kind)
    found = f"{helper}(@as({kind}, {x}), @as({kind}, {y}))"
    return found if element.indexing or SPELLING[dtype] in (kind, "f16", "half") else f"@as(i16, {found})"


# CSL rounds quotients toward zero, Tessera down; past a tensor's end a divisor may be 0.
DIVIDE = {
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
DIVIDE_FLOATS = {
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


@rows(e.bitwise_not)
def _(element, node, x):
    return f"(1 - {x})" if node.types[0].dtype == bool_ else f"(~{x})"


@rows(e.shift_left, e.shift_right)
def _(element, node, x, y):
    kind, sign = SPELLING[node.types[0].dtype], "<<" if node.op is e.shift_left else ">>"
    return f"(@as({kind}, {x}) {sign} @as(u16, {y}))"


@rows(basic.cast)
def _(element, node, x):
    source, target = node.types[0].dtype, node.out.type.dtype
    if source == target or (source.is_float and target.is_float):
        return x
    if target == bool_:
        return f"(if ({x} != {'0.0' if source.is_float else '0'}) @as(i16, 1) else @as(i16, 0))"
    if source.is_float:
        kind = "i64" if target == int64 else "i32"
        element.functions[f"whole_{kind}"] = WHOLE[kind]
        limits = ml_dtypes.iinfo(target.numpy)
        low, high = (str(n) for n in (limits.min, limits.max))
        return f"@as({SPELLING[target]}, whole_{kind}({x}, {low}, {high}))"
    return f"@as({SPELLING[target] if not target.is_float else 'f32'}, {x})"


# Toward zero, and what lies beyond a type at its end; NaN is 0.
_WHOLE = """fn whole_i32(x: f32, low: i32, high: i32) i32 {
  if (x != x) return 0;
  if (x >= LIMIT) return high;
  if (x <= -LIMIT) return low;
  const found = @as(i32, x);
  return if (found < low) low else if (found > high) high else found;
}"""
WHOLE = {"i32": _WHOLE.replace("LIMIT", "2147483648.0"),
         "i64": _WHOLE.replace("LIMIT", "9223372036854775808.0").replace("i32", "i64")}  # fmt: skip
