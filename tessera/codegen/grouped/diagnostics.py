"""Assertions and prints of a group: report nodes whose operands have the leading axis of tiles."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from tessera.codegen.contract import static_shape
from tessera.codegen.grouped.control_flow import build_region
from tessera.codegen.grouped.vectoriser import LEVEL, GroupVectoriser, vectorise
from tessera.core.types import bool_
from tessera.interp.tile.op_rules import expansion_rules
from tessera.ir.core import Value
from tessera.ir.levels import TARGET_OPS, define_target_level
from tessera.ir.rules import STORAGE, Op
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import elementwise, reduce


def _report_nothing(*operands: Any, kind: str, text: str, ordered: bool = False) -> None:
    """Report a print or a failure; operand 0 masks the tiles that print, or the elements where an assertion fails."""


define_target_level(LEVEL)
# Internal to the generators: vectorisation turns assertions and prints into it.
report_op = TARGET_OPS[f"{LEVEL}.report"] = Op(
    f"{LEVEL}.report",
    _report_nothing,
    _report_nothing,
    STORAGE,
    False,
    _report_nothing,
    None,
    frozenset(("io",)),
    ("operands",),
    {k: p for k, p in inspect.signature(_report_nothing).parameters.items() if p.kind is p.KEYWORD_ONLY},
)


@expansion_rules(report_op)
def _(builder, node, args):
    """In the interpreter a failure is an assertion that is false; a print shows all tiles of a program at once."""
    mask, *values = args
    text = node.attrs["text"]
    if node.attrs["kind"] == "print":
        builder.add(tile.print_, values, {"label": text, "ordered": node.attrs["ordered"]})
    else:
        holds = builder.add(elementwise.bitwise_not, [mask]).out
        builder.add(tile.assert_, [holds, *values], {"message": text})
    return ()


@vectorise(tile.assert_)
def _(group, node, args, run):
    condition, *values = args
    rank = len(condition.shape)
    failed = group.add(elementwise.bitwise_not, group.to_varying(condition))
    active = group.active_mask(rank)
    if active is not None:
        failed = group.add(elementwise.bitwise_and, failed, group.broadcast(active, static_shape(failed.type)))
    any_failed = group.add(reduce.max, failed, axis=tuple(range(-rank - 1, 0)), keepdims=False)
    attrs = {"kind": "assert", "text": node.attrs["message"]}
    report_where(
        group,
        any_failed,
        [group.expand_to_group(failed, mask=True), *(group.expand_to_group(group.to_varying(v)) for v in values)],
        attrs,
    )
    return []


@vectorise(tile.print_)
def _(group, node, args, run):
    active = group.full(True, bool_, group.size) if group.active is None else group.active
    attrs = {"kind": "print", "text": node.attrs["label"], "ordered": node.attrs["ordered"]}
    group.builder.add(
        report_op,
        [group.expand_to_group(active, mask=True), *(group.expand_to_group(group.to_varying(p)) for p in args)],
        attrs,
    )
    return []


def report_where(group: GroupVectoriser, condition: Value, operands: Sequence[Value], attrs: dict[str, Any]) -> None:
    """Emit a report in a branch on a condition."""

    def emit_report() -> list[Value]:
        group.builder.add(report_op, operands, attrs)
        return []

    group.builder.add(
        control_flow.if_,
        [condition],
        types=(),
        regions=(build_region(group, (), emit_report), build_region(group, (), list)),
    )
