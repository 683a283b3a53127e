"""Expressions of one element: how each pointwise op is spelled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.codegen.csl.element import Element, unsupported
from tessera.codegen.csl.views import SPELLING
from tessera.ir.core import Node
from tessera.op import Rules
from tessera.ops import basic, functions
from tessera.ops import elementwise as e
from tessera.types import DType, TensorType, bool_

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
    """A constant of an element type."""
    if not dtype.is_float:
        return str(int(value))
    number = float(np.float32(value))
    if math.isnan(number):
        return "@bitcast(f32, @as(u32, 0x7FC00000))"
    if math.isinf(number):
        return f"@bitcast(f32, @as(u32, {BITS[number]}))"
    digits = repr(number)
    mantissa, mark, exponent = digits.partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{mark}{exponent}"


def expression(element: Element, node: Node, operands: list[str]) -> str:
    """The result of a pointwise node: operands widened to its compute type, the result narrowed again."""
    row = rows.get(node.op)
    if row is None:
        raise unsupported(node, "there is no row for it")
    wide = [_wide(t, text) for t, text in zip(node.types, operands, strict=True)]
    text = row(element, node, *wide)
    result = node.out.type
    assert isinstance(result, TensorType)
    narrow = result.dtype.is_float and result.dtype.bits < 32
    return f"@as({SPELLING[result.dtype]}, {text})" if narrow else text


def _wide(type: Any, text: str) -> str:
    return f"@as(f32, {text})" if type.dtype.is_float and type.dtype.bits < 32 else text


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
    if node.types[0].dtype.is_float:
        raise unsupported(node, "it is of floats")
    name = node.op.__name__
    element.functions[name] = DIVIDE[name]
    return f"{name}(@as(i32, {x}), @as(i32, {y}))"


# CSL rounds quotients toward zero, Tessera down; past a tensor's end a divisor may be 0.
DIVIDE = {
    "remainder": """fn remainder(x: i32, y: i32) i32 {
  if (y == 0) return 0;
  const r = x % y;
  return if (r != 0 and (r < 0) != (y < 0)) r + y else r;
}""",
    "floor_divide": """fn floor_divide(x: i32, y: i32) i32 {
  if (y == 0) return 0;
  const q = x / y;
  return if (q * y != x and (x < 0) != (y < 0)) q - 1 else q;
}""",
}


@rows(e.bitwise_not)
def _(element, node, x):
    return f"(1 - {x})" if node.types[0].dtype == bool_ else f"(~{x})"


@rows(basic.cast)
def _(element, node, x):
    source, target = node.types[0].dtype, node.out.type.dtype
    if source == target or (source.is_float and target.is_float):
        return x
    if target == bool_:
        return f"(if ({x} != {'0.0' if source.is_float else '0'}) @as(i16, 1) else @as(i16, 0))"
    if source.is_float:
        raise unsupported(node, "casts from floats to integers saturate, and CSL's do not")
    return f"@as({SPELLING[target] if not target.is_float else 'f32'}, {x})"
