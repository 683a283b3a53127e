"""Emission tables: rows of pointwise ops, for one vector register of elements, and rules of the ops that are
statements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tessera.codegen.coverage import make_refusal_error
from tessera.codegen.llvm.table import REFUSED
from tessera.codegen.llvm.text.builder import RegisterType, copy_register, is_number
from tessera.core.types import DType
from tessera.ir.core import Node
from tessera.ir.rules import Rules
from tessera.ops.tensor import elementwise as e

# Pointwise ops: a row yields the instructions for one vector register.


pointwise_row = Rules("llvm emission")


@dataclass(frozen=True)
class RowTypes:
    """The register type and element type of a row's operands."""

    t: RegisterType
    dtype: DType

    @property
    def kind(self) -> str:
        """f, s, u or b: float, signed, unsigned, bool."""
        return {"float": "f", "int": "s", "uint": "u", "bool": "b"}[self.dtype.kind]


def find_row(node: Node) -> Callable[..., Iterator[str]]:
    """The row of a node's op.

    Raises:
        UnsupportedOpError: the table has none.
    """
    result = pointwise_row.get(node.op)
    if result is None:
        raise make_refusal_error("llvm", node, REFUSED)
    return result


def format_call(name: str, t: RegisterType, *operands: str) -> str:
    """A call of an overloaded function whose operands and result have one type."""
    return f"call {t} @{name}.{t.suffix}({', '.join(f'{t} {x}' for x in operands)})"


def _make_binary_row(**words: str) -> Callable[..., Iterator[str]]:
    """A row of one instruction, chosen by the kind of elements."""

    def rule(s: RowTypes, d: str, x: str, y: str) -> Iterator[str]:
        yield f"{d} = {words[s.kind]} {s.t} {x}, {y}"

    return rule


def _make_compare_row(word: str, unsigned: str = "") -> Callable[..., Iterator[str]]:
    """A comparison; with a NaN operand all but `une` are false."""
    ordered = "une" if word == "ne" else f"o{word}"
    signed = word if word in ("eq", "ne") else f"s{word}"
    words = {"f": f"fcmp {ordered}", "s": f"icmp {signed}"}
    plain = f"icmp {word if word in ('eq', 'ne') else f'u{word}'}"
    return _make_binary_row(**words, u=plain, b=plain)


pointwise_row(e.add)(_make_binary_row(f="fadd", s="add", u="add"))
pointwise_row(e.sub)(_make_binary_row(f="fsub", s="sub", u="sub"))
pointwise_row(e.mul)(_make_binary_row(f="fmul", s="mul", u="mul"))
pointwise_row(e.div)(_make_binary_row(f="fdiv"))
pointwise_row(e.less)(_make_compare_row("lt"))
pointwise_row(e.less_equal)(_make_compare_row("le"))
pointwise_row(e.greater)(_make_compare_row("gt"))
pointwise_row(e.greater_equal)(_make_compare_row("ge"))
pointwise_row(e.equal)(_make_compare_row("eq"))
pointwise_row(e.not_equal)(_make_compare_row("ne"))
pointwise_row(e.bitwise_and)(_make_binary_row(s="and", u="and", b="and"))
pointwise_row(e.bitwise_or)(_make_binary_row(s="or", u="or", b="or"))
pointwise_row(e.bitwise_xor)(_make_binary_row(s="xor", u="xor", b="xor"))


def _make_minmax_row(f: str, s: str, u: str, b: str) -> Callable[..., Iterator[str]]:
    names = {"f": f, "s": s, "u": u}

    def rule(s_: RowTypes, d: str, x: str, y: str) -> Iterator[str]:
        if s_.kind == "b":
            yield f"{d} = {b} {s_.t} {x}, {y}"
        else:
            yield f"{d} = {format_call('llvm.' + names[s_.kind], s_.t, x, y)}"

    return rule


pointwise_row(e.maximum)(_make_minmax_row("maximum", "smax", "umax", "or"))
pointwise_row(e.minimum)(_make_minmax_row("minimum", "smin", "umin", "and"))


@pointwise_row(e.shift_left)
def _(s, d, x, y):
    yield f"{d} = shl {s.t} {x}, {y}"


@pointwise_row(e.shift_right)
def _(s, d, x, y):
    yield f"{d} = {'ashr' if s.kind == 's' else 'lshr'} {s.t} {x}, {y}"


@pointwise_row(e.bitwise_not)
def _(s, d, x):
    yield f"{d} = xor {s.t} {x}, {s.t.const(1 if s.kind == 'b' else -1)}"


@pointwise_row(e.neg)
def _(s, d, x):
    yield f"{d} = fneg {s.t} {x}" if s.kind == "f" else f"{d} = sub {s.t} {s.t.const(0)}, {x}"


@pointwise_row(e.abs)
def _(s, d, x):
    if s.kind == "f":
        yield f"{d} = {format_call('llvm.fabs', s.t, x)}"
    elif s.kind == "s":
        yield f"{d} = call {s.t} @llvm.abs.{s.t.suffix}({s.t} {x}, i1 false)"
    else:
        yield copy_register(s.t, d, x)


@pointwise_row(e.where)
def _(s, d, c, x, y):
    yield f"{d} = select {s.t.truth} {c}, {s.t} {x}, {s.t} {y}"


def _make_rounding_row(name: str) -> Callable[..., Iterator[str]]:
    def rule(s: RowTypes, d: str, x: str) -> Iterator[str]:
        yield f"{d} = {format_call('llvm.' + name, s.t, x)}" if s.kind == "f" else copy_register(s.t, d, x)

    return rule


pointwise_row(e.floor)(_make_rounding_row("floor"))
pointwise_row(e.ceil)(_make_rounding_row("ceil"))
pointwise_row(e.round)(_make_rounding_row("roundeven"))


@pointwise_row(e.sqrt)
def _(s, d, x):
    yield f"{d} = {format_call('llvm.sqrt', s.t, x)}"


@pointwise_row(e.rsqrt)
def _(s, d, x):
    yield f"{d}.r = {format_call('llvm.sqrt', s.t, x)}"
    yield f"{d} = fdiv {s.t} {s.t.const(1)}, {d}.r"


@pointwise_row(e.floor_divide)
def _(s, d, x, y):
    if s.kind == "f":
        yield f"{d} = {format_call('ts.floor_divide', s.t, x, y)}"
    elif (number := _find_divisor(s, y)) > 0:
        yield from _divide_by_constant(s, d, x, y, number)
    else:
        yield from _emit_floor_division(s, d, x, y)
        yield f"{d} = select {s.t.truth} {d}.z, {s.t} {s.t.const(0)}, {s.t} {d}.fq"


@pointwise_row(e.remainder)
def _(s, d, x, y):
    if s.kind == "f":
        yield f"{d} = {format_call('ts.remainder', s.t, x, y)}"
    elif (number := _find_divisor(s, y)) > 0:
        yield from _find_rest_by_constant(s, d, x, y, number)
    else:
        yield from _emit_floor_division(s, d, x, y)
        yield f"{d} = select {s.t.truth} {d}.z, {s.t} {s.t.const(0)}, {s.t} {d}.fr"


def _find_divisor(s: RowTypes, y: str) -> int:
    """The number of an operand that is an integer literal in all lanes, else 0."""
    text = y.removeprefix(f"splat ({s.t.element} ").removesuffix(")")
    return int(text) if s.kind in ("s", "u") and is_number(text) else 0


def _divide_by_constant(s: RowTypes, d: str, x: str, y: str, number: int) -> Iterator[str]:
    """The floor quotient by a positive literal."""
    t = s.t
    if number & (number - 1) == 0:
        yield f"{d} = {'ashr' if s.kind == 's' else 'lshr'} {t} {x}, {t.const(number.bit_length() - 1)}"
    elif s.kind == "u":
        yield f"{d} = udiv {t} {x}, {y}"
    else:
        yield f"{d}.q = sdiv {t} {x}, {y}"
        yield f"{d}.r = srem {t} {x}, {y}"
        yield f"{d}.n = icmp slt {t} {d}.r, {t.const(0)}"
        yield f"{d}.f = sext {t.truth} {d}.n to {t}"
        yield f"{d} = add {t} {d}.q, {d}.f"


def _find_rest_by_constant(s: RowTypes, d: str, x: str, y: str, number: int) -> Iterator[str]:
    """The remainder of the floor quotient by a positive literal."""
    t = s.t
    if number & (number - 1) == 0:
        yield f"{d} = and {t} {x}, {t.const(number - 1)}"
    elif s.kind == "u":
        yield f"{d} = urem {t} {x}, {y}"
    else:
        yield f"{d}.r = srem {t} {x}, {y}"
        yield f"{d}.n = icmp slt {t} {d}.r, {t.const(0)}"
        yield f"{d}.p = add {t} {d}.r, {y}"
        yield f"{d} = select {t.truth} {d}.n, {t} {d}.p, {t} {d}.r"


def _emit_floor_division(s: RowTypes, d: str, x: str, y: str) -> Iterator[str]:
    """The floor quotient .fq and remainder .fr; lanes with divisor 0 (.z) hold any value and do not trap."""
    t, b = s.t, s.t.truth
    zero, one = t.const(0), t.const(1)
    yield f"{d}.z = icmp eq {t} {y}, {zero}"
    if s.kind == "u":
        yield f"{d}.y = select {b} {d}.z, {t} {one}, {t} {y}"
        yield f"{d}.fq = udiv {t} {x}, {d}.y"
        yield f"{d}.fr = urem {t} {x}, {d}.y"
        return
    # The least integer divided by -1 traps too: divide by 1 and negate, which wraps as in NumPy.
    yield f"{d}.m = icmp eq {t} {y}, {t.const(-1)}"
    yield f"{d}.u = or {b} {d}.z, {d}.m"
    yield f"{d}.y = select {b} {d}.u, {t} {one}, {t} {y}"
    yield f"{d}.q0 = sdiv {t} {x}, {d}.y"
    yield f"{d}.r0 = srem {t} {x}, {d}.y"
    yield f"{d}.n0 = sub {t} {zero}, {d}.q0"
    yield f"{d}.q = select {b} {d}.m, {t} {d}.n0, {t} {d}.q0"
    yield f"{d}.sx = xor {t} {d}.r0, {y}"
    yield f"{d}.s = icmp slt {t} {d}.sx, {zero}"
    yield f"{d}.e = icmp ne {t} {d}.r0, {zero}"
    yield f"{d}.f = and {b} {d}.s, {d}.e"
    yield f"{d}.q1 = sub {t} {d}.q, {one}"
    yield f"{d}.fq = select {b} {d}.f, {t} {d}.q1, {t} {d}.q"
    yield f"{d}.r1 = add {t} {d}.r0, {y}"
    yield f"{d}.fr = select {b} {d}.f, {t} {d}.r1, {t} {d}.r0"


# Statements: rule(kernel, node) emits an op that is not fused.


statement_rule = Rules("llvm visit")
