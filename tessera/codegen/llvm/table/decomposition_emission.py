"""Emission of decompositions: an IR function of scalars as instructions on vector registers of any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tessera.codegen.llvm.table.emission import RowTypes, find_row, format_call, pointwise_row
from tessera.codegen.llvm.text.types import RegisterType, get_register_type
from tessera.ops.dialects import arith
from tessera.ops.tensor import basic

if TYPE_CHECKING:
    from tessera.core.types import DType
    from tessera.ir.core import Function, Node, Value


def inline_function(function: Function, width: int, d: str, *operands: str) -> Iterator[str]:
    """The instructions of a decomposition; `d` holds its result, `d.0`, `d.1`, ... the values before."""
    names: dict[Value, str] = dict(zip(function.params, operands, strict=True))
    (result,) = function.results
    for number, node in enumerate(function.body.nodes):
        if node.op is basic.full:
            names[node.out] = get_register_type(node.attrs["dtype"], width).const(node.attrs["value"])
            continue
        name = d if node.out is result else f"{d}.{number}"
        yield from _emit_node(node, width, name, [names[v] for v in node.args])
        names[node.out] = name


def _emit_node(node: Node, width: int, d: str, operands: Sequence[str]) -> Iterator[str]:
    dtype: DType = node.types[-1].dtype  # type: ignore[union-attr]
    t = get_register_type(dtype, width)
    if node.op in (basic.cast, arith.bitcast):
        to = get_register_type(node.out.type.dtype, width)
        word = "bitcast" if node.op is arith.bitcast else _choose_conversion(t, to)
        yield f"{d} = {word} {t} {operands[0]} to {to}"
    else:
        yield from find_row(node)(RowTypes(t, dtype), d, *operands)


def _choose_conversion(source: RegisterType, to: RegisterType) -> str:
    """The instruction that converts signed integers or floats of 32 and 64 bits, but for floats to integers."""
    if source.is_float:
        return "fpext" if to.bits > source.bits else "fptrunc"
    if to.is_float:
        return "sitofp"
    return "sext" if to.bits > source.bits else "trunc"


# The rows of the ops that occur in decompositions alone.


@pointwise_row(arith.fma)
def _(s, d, x, y, z):
    yield f"{d} = {format_call('llvm.fma', s.t, x, y, z)}"


@pointwise_row(arith.copysign)
def _(s, d, x, y):
    yield f"{d} = {format_call('llvm.copysign', s.t, x, y)}"


@pointwise_row(arith.divide)
def _(s, d, x, y):
    yield f"{d} = fdiv {s.t} {x}, {y}"


@pointwise_row(arith.fmod)
def _(s, d, x, y):
    yield f"{d} = frem {s.t} {x}, {y}"


@pointwise_row(arith.trunc)
def _(s, d, x):
    yield f"{d} = {format_call('llvm.trunc', s.t, x)}"


@pointwise_row(arith.extract_bit)
def _(s, d, x, n):
    yield f"{d}.s = lshr {s.t} {x}, {n}"
    yield f"{d} = and {s.t} {d}.s, {s.t.const(1)}"


@pointwise_row(arith.is_nan)
def _(s, d, x):
    yield f"{d} = fcmp uno {s.t} {x}, {x}"
