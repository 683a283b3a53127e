"""Elementwise rows: one element per register by the scalar table, widened before and rounded after; inline assembly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessera.codegen.coverage import make_refusal_error
from tessera.codegen.ptx.context import EmissionContext, at_location
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks.layout_conversion import broadcast_registers
from tessera.codegen.ptx.table.refusals import REFUSED
from tessera.codegen.ptx.table.scalars.arithmetic import ScalarContext, emit
from tessera.codegen.ptx.table.scalars.conversion import convert, convert_for_storage, round_to_narrow
from tessera.codegen.ptx.table.scalars.packing import materialise_operand
from tessera.codegen.ptx.text.register_types import NARROW_FLOATS, ptx_type, register_class
from tessera.core.errors import ArgumentError, UnsupportedOpError
from tessera.core.types import DType, TensorType
from tessera.ir.core import Node, Value
from tessera.ir.rules import COMPUTE
from tessera.ops.dialects.inline_asm import inline

# Pointwise ops: each register's worth of elements by the row of the table, widened before and rounded after.


LARGE_BLOCK = 64  # registers of a block from which on each element is computed all the way


def emit_elementwise(ctx: EmissionContext, nodes: Sequence[Node]) -> None:
    """Pointwise ops one after the other; of large blocks each element all the way, so that few are under way at once.

    Raises:
        UnsupportedOpError: the table has no row for an op.
    """
    rows = [_find_row(node) for node in nodes]
    counts = {ctx.layout(node.out).count for node in nodes}
    found: list[list[str]] = [[] for _ in nodes]
    known: list[dict[tuple[str, ...], str]] = [{} for _ in nodes]
    whole = len(counts) == 1 and min(counts) >= LARGE_BLOCK
    for first in range(min(counts) if whole else 1):
        for place, node in enumerate(nodes):
            made = {n.out: f for n, f in zip(nodes, found, strict=True)}
            held = [made[v] if v in made else ctx.values[v] for v in node.args]
            for i in (first,) if whole else range(ctx.layout(node.out).count):
                operands = tuple(h[i] for h in held)
                if operands not in known[place]:  # equal operands are computed with once
                    with at_location(ctx, node):
                        known[place][operands] = _emit_element(ctx, node, rows[place], operands)
                found[place].append(known[place][operands])
    ctx.values.update((node.out, tuple(f)) for node, f in zip(nodes, found, strict=True))


def _find_row(node: Node) -> Callable[..., str]:
    found = emit.get(node.op)
    if found is None:
        raise make_refusal_error("ptx", node, REFUSED)
    return found


def _emit_element(ctx: EmissionContext, node: Node, rule: Callable[..., str], operands: tuple[str, ...]) -> str:
    text, widths = ctx.text, [_compute_type(node, v) for v in node.args]
    xs = [convert(text, v.type.dtype, w, x) for v, w, x in zip(node.args, widths, operands, strict=True)]
    out = node.out.type
    assert isinstance(out, TensorType)
    found = rule(ScalarContext(text, widths[-1], out.dtype, out.policy), *xs)
    return convert_for_storage(text, widths[-1], out, found) if node.op.numerics == COMPUTE else found


def _compute_type(node: Node, v: Value) -> DType:
    return v.type.compute if node.op.numerics == COMPUTE else v.type.dtype  # type: ignore[union-attr]


# `tile.inline` as PTX: the user's own instructions, for each element.


@emission_rule(inline)
def _(ctx: EmissionContext, node: Node) -> None:
    if not node.attrs["ptx"]:
        raise UnsupportedOpError(
            "this tile.inline has no text for the target ptx", location=node.loc, expected='ptx="..."',
            suggestion='give the instructions: tile.inline(x, python=f, ptx="neg.f32 {out}, {0};")',
        )  # fmt: skip
    layout, out = ctx.layout(node.out), node.out.type.dtype
    operands = [broadcast_registers(ctx, v, layout) for v in node.args]
    found = []
    for names in zip(*operands, strict=True):
        register = _fill_template(ctx, node, names)
        found.append(round_to_narrow(ctx.text, out, register) if out in NARROW_FLOATS else register)
    ctx.values[node.out] = tuple(found)


def _fill_template(ctx: EmissionContext, node: Node, names: tuple[str, ...]) -> str:
    """The text with registers put in, line by line; the register of its result."""
    text = ctx.text
    out = text.new(ptx_type(node.out.type.dtype))  # type: ignore[union-attr]
    given = [materialise_operand(text, register_class(v.type.dtype), x) for v, x in zip(node.args, names, strict=True)]
    try:
        lines = node.attrs["ptx"].format(*given, out=out)
    except (KeyError, IndexError, ValueError) as error:
        raise ArgumentError(
            f"the ptx text of tile.inline cannot be filled in: {error}", location=node.loc,
            expected="{out}, and {0} for each operand; other braces doubled",
        ) from None  # fmt: skip
    for line in lines.split(";"):
        if line.strip():
            text.line(line.strip())
    return out
