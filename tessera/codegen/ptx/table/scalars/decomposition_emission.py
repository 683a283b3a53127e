"""Emission of decompositions: an IR function of scalars as instructions on the registers of one element."""

from __future__ import annotations

from tessera.codegen.ptx.table.scalars.scalar_context import ScalarContext, ScalarRow, emit
from tessera.codegen.ptx.text.builder import PtxBuilder
from tessera.codegen.ptx.text.register_types import typed_literal
from tessera.core.types import DType, f32
from tessera.ir.core import Function, Node, Value
from tessera.ops.dialects import arith
from tessera.ops.tensor import basic


def emit_decomposition(text: PtxBuilder, function: Function, *operands: str) -> str:
    """The register of the result of a decomposition."""
    registers: dict[Value, str] = dict(zip(function.params, operands, strict=True))
    constants, steps = _plan(function)
    registers.update(constants)
    for node, rule, dtype, out in steps:
        registers[node.out] = rule(ScalarContext(text, dtype, out), *[registers[v] for v in node.args])
    return registers[function.results[0]]


Step = tuple[Node, ScalarRow, DType, DType]  # a node, its row, and the element types of operands and result
_PLANS: dict[int, tuple[Function, dict[Value, str], list[Step]]] = {}  # by the identity of a function, which it keeps


def _plan(function: Function) -> tuple[dict[Value, str], list[Step]]:
    """The literals and steps of a decomposition, which is emitted once for each element."""
    if id(function) not in _PLANS:
        constants, steps = {}, []
        for node in function.body.nodes:
            out = node.out.type.dtype  # type: ignore[union-attr]
            if node.op is basic.full:
                constants[node.out] = typed_literal(node.attrs["value"], out)
            else:
                steps.append((node, emit.of(node.op), node.types[-1].dtype, out))  # type: ignore[union-attr]
        _PLANS[id(function)] = function, constants, steps
    return _PLANS[id(function)][1:]


# The rows of the ops that occur in decompositions alone.


@emit(arith.bitcast)
def _(s, x):
    bits = s.out.bits
    return s.text.let(f"mov.b{bits}", f"{'f' if s.out.is_float else 'b'}{bits}", x)


@emit(arith.fma)
def _(s, x, y, z):
    return s.do(f"fma.rn.{s.word}", x, y, z)


@emit(arith.copysign)
def _(s, x, y):
    return s.do(f"copysign.{s.word}", y, x)


@emit(arith.divide)
def _(s, x, y):
    return s.do(f"div.rn.{s.word}", x, y)


@emit(arith.is_nan)
def _(s, x):
    return s.text.let(f"setp.nan.{s.word}", "pred", x, x)


@emit(arith.trunc)
def _(s, x):
    return s.do(f"cvt.rzi.{s.word}.{s.word}", x)


@emit(arith.extract_bit)
def _(s, x, n):
    return s.do("bfe.u32", x, n, 1)


@emit(arith.fmod)
def _(s, x, y):
    if s.dtype != f32:
        return _emit_fmod(s.text, x, y)
    wide = [s.text.let("cvt.f64.f32", "f64", each) for each in (x, y)]
    return s.text.let("cvt.rn.f32.f64", "f32", _emit_fmod(s.text, *wide))


DOUBLE_ZERO, DOUBLE_INFINITY, DOUBLE_NAN = "0d0000000000000000", "0d7FF0000000000000", "0d7FF8000000000000"


def _emit_fmod(text: PtxBuilder, x: str, y: str) -> str:
    """What is left of f64 `x` when whole multiples of `y` are taken away: exact.

    Each round takes away a multiple of 26 bits, rounded down, so that the rest is exact as well.
    """
    large, size = text.let("abs.f64", "f64", x), text.let("abs.f64", "f64", y)
    usable = text.let("setp.gt.f64", "pred", size, DOUBLE_ZERO)
    finite = text.let("setp.lt.f64", "pred", large, DOUBLE_INFINITY)
    fine = text.let("and.pred", "pred", usable, finite)
    rest = text.let("selp.f64", "f64", large, DOUBLE_NAN, fine)
    again, done = text.new_label("again"), text.new_label("done")
    text.label(again)
    text.do(f"bra {done}", guard=text.let("setp.ltu.f64", "pred", rest, size))
    quotient = text.let("cvt.rzi.f64.f64", "f64", text.let("div.rz.f64", "f64", rest, size))
    bits = text.let("and.b64", "b64", text.let("mov.b64", "b64", quotient), "0xFFFFFFFFF8000000")
    taken = text.let("neg.f64", "f64", text.let("mov.b64", "f64", bits))
    text.do("fma.rn.f64", rest, taken, size, rest)
    text.do(f"bra {again}")
    text.label(done)
    return text.let("copysign.f64", "f64", x, rest)
