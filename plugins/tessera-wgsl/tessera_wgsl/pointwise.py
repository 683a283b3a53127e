"""Pointwise rows: ops on one element as WGSL expressions, and functions of f32 as decompositions.

Registers hold f32, i32, u32 or bool. f16 and bf16 are in f32, rounded after each op. Integers of 8 and 16 bits are in
i32 and u32, and wrap after each op; int64 is an i32 whose interval is proven (`tessera_wgsl.kernel`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import tessera.ops
from tessera.codegen.coverage import MESH_OPS_REASON, list_mesh_ops
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType, bf16, bool_, f16, f32, f64, int64
from tessera.ir.core import Function, Node, Value
from tessera.ir.rules import REGISTRY, Rules
from tessera.lower.scalar_functions import single_precision
from tessera.lower.scalar_functions.decomposition import SHARED
from tessera.ops.dialects import arith, inline_asm, mbarrier, tile
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e

assert single_precision and tessera.ops  # fills the table of decompositions

# row(node, *operands) gives the expression of one element; operands are names or literals.
pointwise_row = Rules("wgsl pointwise")
_F64_REASON = "its decomposition computes in f64, which WGSL does not have"
REFUSED = {
    **dict.fromkeys(list_mesh_ops(), MESH_OPS_REASON),
    **dict.fromkeys((REGISTRY[f"ts.{name}"] for name in ("sin", "cos", "atan", "pow")), _F64_REASON),
    **dict.fromkeys((tile.line, tile.pause), "stepping through source lines needs the interpreter"),
    **dict.fromkeys((tile.print_, inline_asm.inline), "a shader cannot call the host"),
    tile.assert_: "a shader cannot stop its launch",
    tile.compare_exchange: "its row is missing: the words of a buffer hold other types",
    basic.dim_value: "sizes are known when a shader is made",
    REGISTRY["ts.round_by_chance"]: "its generator needs integers of 64 bits",
    tile.grid_barrier: "WebGPU has no barrier of all workgroups",
    **dict.fromkeys(
        (mbarrier.mbarrier_init, mbarrier.mbarrier_arrive, mbarrier.mbarrier_expect, mbarrier.mbarrier_copies,
         mbarrier.mbarrier_wait), "WebGPU has no asynchronous copies"),
}  # fmt: skip


# Types and literals.

NARROW = {f16: "f16", bf16: "bf16"}  # floats that registers hold as f32, by the name of their functions below


def name_type(dtype: DType) -> str:
    """The WGSL type of a register for an element type."""
    if dtype == bool_:
        return "bool"
    return "f32" if dtype.is_float else "i32" if dtype.kind == "int" else "u32"


def format_literal(dtype: DType, value: Any) -> str:
    """A number as a WGSL expression; infinities and NaN are made at run time, since constants may not be either."""
    if dtype == bool_:
        return "true" if value else "false"
    if dtype in NARROW and math.isfinite(value):
        value = float(np.float64(value).astype(dtype.numpy))
    if dtype.is_float:
        number = struct.unpack("<f", struct.pack("<f", value))[0] if abs(value) <= 3.5e38 else float(value)
        if not math.isfinite(number):
            bits = 0x7FC00000 if math.isnan(number) else 0x7F800000 if number > 0 else 0xFF800000
            return f"from_bits({bits}u)"
        return f"f32({number!r})"
    if dtype.kind != "int":
        return f"{int(value) % (1 << 32)}u"
    return f"i32({int(value)})" if int(value) != -(1 << 31) else "(-2147483647 - 1)"


def round_narrow(node: Node, text: str) -> str:
    """The expression of a node's result, rounded to the numbers of its type."""
    name = NARROW.get(node.out.type.dtype)
    return text if name is None or node.op in EXACT else f"round_{name}({text})"


def wrap(dtype: DType, text: str) -> str:
    """An expression of i32 or u32 reduced to the bits of a narrower type."""
    if not dtype.is_integer or dtype.bits >= 32:
        return text
    if dtype.kind == "int":
        return f"((({text}) << {32 - dtype.bits}u) >> {32 - dtype.bits}u)"
    return f"(({text}) & {(1 << dtype.bits) - 1}u)"


# The text before every shader; `args.words[1].z` is 0, which no compiler knows.
PRELUDE = """\
fn from_bits(x: u32) -> f32 { return bitcast<f32>(x); }
fn keep(x: f32) -> f32 { return bitcast<f32>(bitcast<u32>(x) ^ args.words[1].z); }
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }
fn widen_bf16(x: u32) -> f32 { return from_bits(x << 16u); }
fn narrow_bf16(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  return select((bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u, (bits >> 16u) | 0x40u, is_nan(x));
}
fn round_bf16(x: f32) -> f32 { return widen_bf16(narrow_bf16(x)); }
fn widen_f16(x: u32) -> f32 {
  let sign = (x & 0x8000u) << 16u;
  let exponent = (x >> 10u) & 31u;
  if (exponent == 0u) { return from_bits(sign | bitcast<u32>(f32(x & 1023u) * 5.9604644775390625e-8)); }
  return from_bits(sign | (select(exponent + 112u, 255u, exponent == 31u) << 23u) | ((x & 1023u) << 13u));
}
fn narrow_f16(x: f32) -> u32 {
  let size = bitcast<u32>(x) & 0x7fffffffu;
  let sign = (bitcast<u32>(x) >> 16u) & 0x8000u;
  if (size > 0x7f800000u) { return sign | 0x7e00u; }
  if (size >= 0x477ff000u) { return sign | 0x7c00u; }
  if (size < 0x38800000u) { return sign | (bitcast<u32>(from_bits(size) + 0.5) - 0x3f000000u); }
  return sign | ((size + 0xfffu + ((size >> 13u) & 1u) - 0x38000000u) >> 13u);
}
fn round_f16(x: f32) -> f32 { return widen_f16(narrow_f16(x)); }
fn to_odd_i32(x: i32) -> f32 {
  if (abs(x) < 16777216 && x != (-2147483647 - 1)) { return f32(x); }
  return f32((x >> 8u) | select(0, 1, (x & 255) != 0)) * 256.0;
}
fn to_odd_u32(x: u32) -> f32 {
  if (x < 16777216u) { return f32(x); }
  return f32((x >> 8u) | select(0u, 1u, (x & 255u) != 0u)) * 256.0;
}
fn maximum_f32(x: f32, y: f32) -> f32 {
  if (is_nan(x)) { return x; }
  if (is_nan(y)) { return y; }
  if (x == y) { return from_bits(bitcast<u32>(x) & bitcast<u32>(y)); }
  return select(y, x, x > y);
}
fn minimum_f32(x: f32, y: f32) -> f32 {
  if (is_nan(x)) { return x; }
  if (is_nan(y)) { return y; }
  if (x == y) { return from_bits(bitcast<u32>(x) | bitcast<u32>(y)); }
  return select(y, x, x < y);
}
fn floor_divide_i32(x: i32, y: i32) -> i32 {
  if (y == 0) { return 0; }
  if (y == -1) { return 0 - x; }
  let q = x / y;
  return select(q, q - 1, (x % y != 0) && ((x < 0) != (y < 0)));
}
fn remainder_i32(x: i32, y: i32) -> i32 {
  if (y == 0 || y == -1) { return 0; }
  let r = x % y;
  return select(r, r + y, (r != 0) && ((r < 0) != (y < 0)));
}
fn floor_divide_u32(x: u32, y: u32) -> u32 {
  if (y == 0u) { return 0u; }
  return x / y;
}
fn remainder_u32(x: u32, y: u32) -> u32 {
  if (y == 0u) { return 0u; }
  return x % y;
}
fn to_i32(x: f32, low: i32, high: i32) -> i32 {
  if (is_nan(x)) { return 0; }
  if (x <= f32(low)) { return low; }
  if (x >= f32(high)) { return high; }
  return i32(x);
}
fn to_u32(x: f32, high: u32) -> u32 {
  if (is_nan(x) || x <= 0.0) { return 0u; }
  if (x >= f32(high)) { return high; }
  return u32(x);
}
fn divide_f32(x: f32, y: f32) -> f32 {
  let a = bitcast<u32>(x);
  let b = bitcast<u32>(y);
  let sign = (a ^ b) & 0x80000000u;
  if (is_nan(x) || is_nan(y)) { return from_bits(0x7fc00000u); }
  if ((b & 0x7fffffffu) == 0u) {
    if ((a & 0x7fffffffu) == 0u) { return from_bits(0x7fc00000u); }
    return from_bits(sign | 0x7f800000u);
  }
  return x / y;
}
fn copysign_f32(x: f32, y: f32) -> f32 {
  return from_bits((bitcast<u32>(x) & 0x7fffffffu) | (bitcast<u32>(y) & 0x80000000u));
}
fn sqrt_f32(x: f32) -> f32 {
  if (x < 0.0) { return from_bits(0x7fc00000u); }
  return sqrt(x);
}
"""


# Rows.


def _make_infix_row(sign: str) -> Callable[..., str]:
    return lambda node, x, y: wrap(node.out.type.dtype, f"({x} {sign} {y})")


for _op, _sign in ((e.add, "+"), (e.sub, "-"), (e.mul, "*")):
    pointwise_row(_op)(_make_infix_row(_sign))
for _op, _sign in (
    (e.less, "<"), (e.less_equal, "<="), (e.greater, ">"), (e.greater_equal, ">="), (e.equal, "=="),
    (e.not_equal, "!="),
):  # fmt: skip
    pointwise_row(_op)(lambda node, x, y, sign=_sign: _compare(node.args[0].type.dtype, sign, x, y))


def _compare(dtype: DType, sign: str, x: str, y: str) -> str:
    if dtype == bool_ and sign not in ("==", "!="):
        return f"(select(0u, 1u, {x}) {sign} select(0u, 1u, {y}))"
    if dtype.is_float and sign == "!=":  # drivers compare ordered: NaN != NaN would be false
        return f"(is_nan({x}) || is_nan({y}) || {x} != {y})"
    return f"({x} {sign} {y})"


for _op, _sign, _logic in ((e.bitwise_and, "&", "&"), (e.bitwise_or, "|", "|"), (e.bitwise_xor, "^", "!=")):
    pointwise_row(_op)(
        lambda node, x, y, sign=_sign, logic=_logic: f"({x} {logic if node.out.type.dtype == bool_ else sign} {y})"
    )


@pointwise_row(e.maximum, e.minimum)
def _(node, x, y):
    dtype, name = node.out.type.dtype, node.op.__name__
    if dtype == bool_:
        return f"({x} {'|' if name == 'maximum' else '&'} {y})"
    return f"{name}_f32({x}, {y})" if dtype.is_float else f"{name[:3]}({x}, {y})"


@pointwise_row(e.div, arith.divide)
def _(node, x, y):
    return f"divide_f32({x}, {y})"


@pointwise_row(e.neg)
def _(node, x):
    dtype = node.out.type.dtype
    zero = "0u" if dtype.kind == "uint" else "0"
    return f"(-{x})" if dtype.is_float else wrap(dtype, f"({zero} - {x})")


@pointwise_row(e.abs)
def _(node, x):
    return wrap(node.out.type.dtype, f"abs({x})")


@pointwise_row(e.where)
def _(node, c, x, y):
    return f"select({y}, {x}, {c})"


@pointwise_row(e.floor, e.ceil, e.round, arith.trunc)
def _(node, x):
    return f"{node.op.__name__}({x})" if node.out.type.dtype.is_float else x


@pointwise_row(e.sqrt)
def _(node, x):
    return f"sqrt_f32({x})"


@pointwise_row(e.rsqrt)
def _(node, x):
    return f"divide_f32(1.0, sqrt_f32({x}))"


@pointwise_row(e.shift_left, e.shift_right)
def _(node, x, y):
    sign = "<<" if node.op is e.shift_left else ">>"
    return wrap(node.out.type.dtype, f"({x} {sign} u32({y}))")


@pointwise_row(e.bitwise_not)
def _(node, x):
    return f"(!{x})" if node.out.type.dtype == bool_ else wrap(node.out.type.dtype, f"(~{x})")


@pointwise_row(e.floor_divide, e.remainder)
def _(node, x, y):
    dtype = node.out.type.dtype
    if dtype.is_float:
        return call_function(node, x, y)
    return wrap(dtype, f"{node.op.__name__}_{name_type(dtype)}({x}, {y})")


@pointwise_row(basic.cast)
def _(node, x):
    source, to = node.args[0].type.dtype, node.out.type.dtype
    if to == bool_:
        return x if source == bool_ else f"({x} != {name_type(source)}(0))"
    if source == bool_:
        return f"select({name_type(to)}(0), {name_type(to)}(1), {x})"
    if source.is_float and to.is_integer:
        return _cast_to_integer(to, x)
    if to in NARROW and source.is_integer and source.bits >= 32:
        return f"to_odd_{name_type(source)}({x})"  # it is rounded once, by round_narrow
    return wrap(to, f"{name_type(to)}({x})")


def _cast_to_integer(to: DType, x: str) -> str:
    if to == int64:
        raise UnsupportedOpError(
            "the target wgsl cannot emit ts.cast from f32 to int64: WGSL has no integers of 64 bits"
        )
    bits = to.bits
    if to.kind != "int":
        return f"to_u32({x}, {(1 << bits) - 1}u)"
    low = "(-2147483647 - 1)" if bits == 32 else str(-(1 << bits - 1))
    return f"to_i32({x}, {low}, {(1 << bits - 1) - 1})"


@pointwise_row(arith.bitcast, REGISTRY["ts.bitcast"])
def _(node, x):
    source, to = node.args[0].type.dtype, node.out.type.dtype
    if source in NARROW:
        bits = f"narrow_{NARROW[source]}({x})"
        return f"widen_{NARROW[to]}({bits})" if to in NARROW else wrap(to, f"{name_type(to)}({bits})")
    if to in NARROW:
        return f"widen_{NARROW[to]}(u32({x}) & 0xffffu)"
    return f"bitcast<{name_type(to)}>({x})"


@pointwise_row(arith.fma)
def _(node, x, y, z):
    return f"fma({x}, {y}, {z})"


@pointwise_row(arith.copysign)
def _(node, x, y):
    return f"copysign_f32({x}, {y})"


@pointwise_row(arith.extract_bit)
def _(node, x, n):
    return f"(({x} >> {n}) & 1u)"


@pointwise_row(arith.is_nan)
def _(node, x):
    return f"is_nan({x})"


@pointwise_row(arith.fmod)
def _(node, x, y):
    return f"fmod_f32({x}, {y})"


# Functions of f32: the shared decompositions, which round a fused multiply-add once or twice.


def _computes_in_f64(op: Any) -> bool:
    function = SHARED.find(op, f32)
    return function is None or any(t.dtype in (f64, int64) for n in function.body.nodes for t in n.result_types)


FUNCTIONS = {op: SHARED.find(op, f32) for op in SHARED.ops() if not _computes_in_f64(op)}


def call_function(node: Node, *operands: str) -> str:
    """A call of a decomposed function."""
    if node.args[0].type.dtype not in (f32, *NARROW) or node.op not in FUNCTIONS:
        raise UnsupportedOpError(
            f"the target wgsl cannot emit {node.op.name} of {node.args[0].type.dtype}: {_F64_REASON}",
            suggestion="cast to ts.f32",
        )
    return f"ts_{node.op.__name__}({', '.join(operands)})"


# Ops whose results are numbers of the type of their operands.
EXACT = (
    e.neg, e.abs, e.where, e.maximum, e.minimum, e.floor, e.ceil, e.round, arith.trunc, arith.copysign, arith.bitcast,
    REGISTRY["ts.bitcast"],
)  # fmt: skip

for _op in FUNCTIONS:
    if _op not in pointwise_row:
        pointwise_row(_op)(call_function)


FMOD = """\
fn fmod_f32(x: f32, y: f32) -> f32 {
  let ay = bitcast<u32>(y) & 0x7fffffffu;
  var a = bitcast<u32>(x) & 0x7fffffffu;
  if (ay == 0u || a >= 0x7f800000u || ay > 0x7f800000u) { return from_bits(0x7fc00000u); }
  if (a < ay) { return x; }
  let sign = bitcast<u32>(x) & 0x80000000u;
  var ea = i32(a >> 23u);
  let eb = i32(ay >> 23u);
  var ma = select((a & 0x7fffffu) | 0x800000u, (a & 0x7fffffu) << 1u, ea == 0);
  let mb = select((ay & 0x7fffffu) | 0x800000u, (ay & 0x7fffffu) << 1u, eb == 0);
  loop {
    if (ea <= eb) { break; }
    if (ma >= mb) { ma = ma - mb; }
    ma = ma << 1u;
    ea = ea - 1;
  }
  if (ma >= mb) { ma = ma - mb; }
  if (ma == 0u) { return from_bits(sign); }
  loop {
    if (ma >= 0x800000u || ea <= 0) { break; }
    ma = ma << 1u;
    ea = ea - 1;
  }
  if (ea <= 0) { return from_bits(sign | (ma >> u32(1 - ea))); }
  return from_bits(sign | (u32(ea) << 23u) | (ma & 0x7fffffu));
}
"""


def define_functions(text: str) -> str:
    """The definitions of the functions that a text calls."""
    made = [define_function(op.__name__, f) for op, f in sorted(FUNCTIONS.items(), key=lambda item: item[0].name)
            if f"ts_{op.__name__}(" in text]  # fmt: skip
    needs_fmod = any("fmod_f32(" in each for each in made)
    return "".join([PRELUDE, FMOD if needs_fmod else "", *made])


SUMS = (e.add, e.sub, arith.fma)


def keep_sums(node: Node, operands: Sequence[str], producers: Mapping[Value, Node]) -> list[str]:
    """The operands of an op, with those hidden from compilers that they would simplify wrongly.

    (x + c) - c is not x, 0 * x is not 0 for infinities and NaN, x + 0 is not x for -0, and x - x may be NaN.
    """
    if node.op not in (*SUMS, e.mul) or node.out.type.dtype not in (f32, *NARROW):
        return [*operands]
    found = []
    for i, (v, x) in enumerate(zip(node.args, operands, strict=True)):
        inner = producers.get(v)
        hidden = (node.op in SUMS and inner is not None and inner.op in SUMS) or _is_zero(inner, producers)
        found.append(f"keep({x})" if hidden or v in node.args[:i] else x)
    return found


def _is_zero(node: Node | None, producers: Mapping[Value, Node]) -> bool:
    """Whether a value is a constant 0 in all elements."""
    while node is not None and node.op in (basic.broadcast, shape.reshape, basic.cast):
        node = producers.get(node.args[0])
    return node is not None and node.op is basic.full and node.attrs["value"] == 0


def define_function(name: str, function: Function) -> str:
    """A decomposition as a WGSL function."""
    names = {p: x for p, x in zip(function.params, "xyz", strict=False)}
    params = ", ".join(f"{x}: f32" for x in names.values())
    (result,) = function.results
    producers = {v: n for n in function.body.nodes for v in n.results}
    lines = [f"fn ts_{name}({params}) -> {name_type(result.type.dtype)} {{"]
    for number, node in enumerate(function.body.nodes):
        if node.op is basic.full:
            names[node.out] = format_literal(node.attrs["dtype"], node.attrs["value"])
            continue
        operands = keep_sums(node, [names[v] for v in node.args], producers)
        expression = pointwise_row.of(node.op)(node, *operands)
        names[node.out] = f"v{number}"
        lines.append(f"  let v{number} = {expression};")
    return "\n".join([*lines, f"  return {names[result]};", "}", ""])
