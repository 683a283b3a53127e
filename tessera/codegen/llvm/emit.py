"""The emission table of the pointwise ops: each row yields the lines for one register's worth of elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tessera.codegen.llvm.convert import copy
from tessera.codegen.llvm.types import Vec
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Node
from tessera.op import Rules
from tessera.ops import elementwise as e
from tessera.ops import functions as f
from tessera.types import DType

emit = Rules("llvm emission")
Lines = Iterator[str]


@dataclass(frozen=True)
class Spot:
    """What a row needs to know besides names: the operands' register type and element type."""

    t: Vec
    dtype: DType

    @property
    def kind(self) -> str:
        """f, s, u or b: float, signed, unsigned, bool."""
        return {"float": "f", "int": "s", "uint": "u", "bool": "b"}[self.dtype.kind]


def row(node: Node) -> Callable[..., Lines]:
    """The row for a node.

    Raises:
        UnsupportedOpError: there is none.
    """
    found = emit.get(node.op)
    if found is None:
        raise UnsupportedOpError(
            f"the target llvm has no emission for {node.op.name}", location=node.loc,
            expected="an op with an @emit row in codegen/llvm/emit.py, or a lowering",
        )  # fmt: skip
    return found


def call(name: str, t: Vec, *operands: str) -> str:
    """A call of an overloaded function whose operands and result have one type."""
    return f"call {t} @{name}.{t.suffix}({', '.join(f'{t} {x}' for x in operands)})"


def _binary(**words: str) -> Callable[..., Lines]:
    """A row with one instruction, which depends on the kind of elements."""

    def rule(s: Spot, d: str, x: str, y: str) -> Lines:
        yield f"{d} = {words[s.kind]} {s.t} {x}, {y}"

    return rule


def _compare(word: str, unsigned: str = "") -> Callable[..., Lines]:
    """A comparison; NaN makes each false but `une`."""
    ordered = "une" if word == "ne" else f"o{word}"
    signed = word if word in ("eq", "ne") else f"s{word}"
    words = {"f": f"fcmp {ordered}", "s": f"icmp {signed}"}
    plain = f"icmp {word if word in ('eq', 'ne') else f'u{word}'}"
    return _binary(**words, u=plain, b=plain)


emit(e.add)(_binary(f="fadd", s="add", u="add"))
emit(e.sub)(_binary(f="fsub", s="sub", u="sub"))
emit(e.mul)(_binary(f="fmul", s="mul", u="mul"))
emit(e.div)(_binary(f="fdiv"))
emit(e.less)(_compare("lt"))
emit(e.less_equal)(_compare("le"))
emit(e.greater)(_compare("gt"))
emit(e.greater_equal)(_compare("ge"))
emit(e.equal)(_compare("eq"))
emit(e.not_equal)(_compare("ne"))
emit(e.bitwise_and)(_binary(s="and", u="and", b="and"))
emit(e.bitwise_or)(_binary(s="or", u="or", b="or"))
emit(e.bitwise_xor)(_binary(s="xor", u="xor", b="xor"))


def _extreme(f: str, s: str, u: str, b: str) -> Callable[..., Lines]:
    names = {"f": f, "s": s, "u": u}

    def rule(spot: Spot, d: str, x: str, y: str) -> Lines:
        if spot.kind == "b":
            yield f"{d} = {b} {spot.t} {x}, {y}"
        else:
            yield f"{d} = {call('llvm.' + names[spot.kind], spot.t, x, y)}"

    return rule


emit(e.maximum)(_extreme("maximum", "smax", "umax", "or"))
emit(e.minimum)(_extreme("minimum", "smin", "umin", "and"))


@emit(e.shift_left)
def _(s, d, x, y):
    yield f"{d} = shl {s.t} {x}, {y}"


@emit(e.shift_right)
def _(s, d, x, y):
    yield f"{d} = {'ashr' if s.kind == 's' else 'lshr'} {s.t} {x}, {y}"


@emit(e.bitwise_not)
def _(s, d, x):
    yield f"{d} = xor {s.t} {x}, {s.t.const(1 if s.kind == 'b' else -1)}"


@emit(e.neg)
def _(s, d, x):
    yield f"{d} = fneg {s.t} {x}" if s.kind == "f" else f"{d} = sub {s.t} {s.t.const(0)}, {x}"


@emit(e.abs)
def _(s, d, x):
    if s.kind == "f":
        yield f"{d} = {call('llvm.fabs', s.t, x)}"
    elif s.kind == "s":
        yield f"{d} = call {s.t} @llvm.abs.{s.t.suffix}({s.t} {x}, i1 false)"
    else:
        yield copy(s.t, d, x)


@emit(e.where)
def _(s, d, c, x, y):
    yield f"{d} = select {s.t.truth} {c}, {s.t} {x}, {s.t} {y}"


def _whole(name: str) -> Callable[..., Lines]:
    def rule(s: Spot, d: str, x: str) -> Lines:
        yield f"{d} = {call('llvm.' + name, s.t, x)}" if s.kind == "f" else copy(s.t, d, x)

    return rule


emit(e.floor)(_whole("floor"))
emit(e.ceil)(_whole("ceil"))
emit(e.round)(_whole("roundeven"))


@emit(e.sqrt)
def _(s, d, x):
    yield f"{d} = {call('llvm.sqrt', s.t, x)}"


@emit(e.rsqrt)
def _(s, d, x):
    yield f"{d}.r = {call('llvm.sqrt', s.t, x)}"
    yield f"{d} = fdiv {s.t} {s.t.const(1)}, {d}.r"


def _function(name: str) -> Callable[..., Lines]:
    """A function written out in codegen/llvm/math; f64 goes to the C library's."""

    def rule(s: Spot, d: str, *operands: str) -> Lines:
        yield f"{d} = {call('ts.' + name, s.t, *operands)}"

    return rule


for _op in (e.exp, e.exp2, e.log, e.log2, e.tanh, e.erf, e.sin, e.cos, e.pow, f.expm1, f.log1p, f.atan):
    emit(_op)(_function(_op.__name__))


@emit(e.floor_divide)
def _(s, d, x, y):
    if s.kind == "f":
        yield f"{d} = {call('ts.floor_divide', s.t, x, y)}"
    else:
        yield from _divided(s, d, x, y)
        yield f"{d} = select {s.t.truth} {d}.z, {s.t} {s.t.const(0)}, {s.t} {d}.fq"


@emit(e.remainder)
def _(s, d, x, y):
    if s.kind == "f":
        yield f"{d} = {call('ts.remainder', s.t, x, y)}"
    else:
        yield from _divided(s, d, x, y)
        yield f"{d} = select {s.t.truth} {d}.z, {s.t} {s.t.const(0)}, {s.t} {d}.fr"


def _divided(s: Spot, d: str, x: str, y: str) -> Lines:
    """Floor quotient .fq and remainder .fr; lanes with divisor 0 (.z) hold anything, and never trap."""
    t, b = s.t, s.t.truth
    zero, one = t.const(0), t.const(1)
    yield f"{d}.z = icmp eq {t} {y}, {zero}"
    if s.kind == "u":
        yield f"{d}.y = select {b} {d}.z, {t} {one}, {t} {y}"
        yield f"{d}.fq = udiv {t} {x}, {d}.y"
        yield f"{d}.fr = urem {t} {x}, {d}.y"
        return
    # The least integer divided by -1 traps too: divide by 1 and negate, which wraps as NumPy does.
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
