"""Assertions and prints of a group, as report ops whose operands have the leading axis of tiles."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from tessera.codegen.block_types import static_shape
from tessera.codegen.grouped.control_flow import build_region
from tessera.codegen.grouped.vectoriser import GroupVectoriser, vectorise
from tessera.core.types import bool_
from tessera.ir.core import Value
from tessera.ir.rules import STORAGE, Op
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import elementwise, reduce


def _report_nothing(*operands: Any, kind: str, text: str, ordered: bool = False) -> None:
    """What a program says: for an assertion the elements where it fails, for a print the tiles that print first."""


# Not of the Tile level: what `lift` makes of assertions and prints, with the tiles' axis first in every operand.
report_op = Op(
    "grouped.report",
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


@vectorise(tile.assert_)
def _(group, node, args, run):
    condition, *values = args
    rank = len(condition.shape)
    wrong = group.add(elementwise.bitwise_not, group.whole(condition))
    active = group.running(rank)
    if active is not None:
        wrong = group.add(elementwise.bitwise_and, wrong, group.broadcast(active, static_shape(wrong.type)))
    some = group.add(reduce.max, wrong, axis=tuple(range(-rank - 1, 0)), keepdims=False)
    says = {"kind": "assert", "text": node.attrs["message"]}
    report_where(group, some, [group.seen(wrong, mask=True), *(group.seen(group.whole(v)) for v in values)], says)
    return []


@vectorise(tile.print_)
def _(group, node, args, run):
    active = group.full(True, bool_, group.size) if group.active is None else group.active
    says = {"kind": "print", "text": node.attrs["label"], "ordered": node.attrs["ordered"]}
    group.b.add(report_op, [group.seen(active, mask=True), *(group.seen(group.whole(p)) for p in args)], says)
    return []


def report_where(group: GroupVectoriser, condition: Value, operands: Sequence[Value], says: dict[str, Any]) -> None:
    """A report where a condition holds."""

    def say() -> list[Value]:
        group.b.add(report_op, operands, says)
        return []

    group.b.add(
        control_flow.if_, [condition], types=(), regions=(build_region(group, (), say), build_region(group, (), list))
    )
