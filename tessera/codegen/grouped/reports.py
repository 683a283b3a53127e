"""Assertions and prints of a group: blocks handed to the runtime, with the tiles' axis first in each."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from tessera.codegen.blocks import sizes
from tessera.codegen.grouped.control import region
from tessera.codegen.grouped.rewrite import Group, lift
from tessera.ir.core import Value
from tessera.op import STORAGE, Op
from tessera.ops import checks, control, elementwise, reduce
from tessera.types import bool_


def _nothing(*operands: Any, kind: str, text: str, ordered: bool = False) -> None:
    """What a program says: for an assertion the elements where it fails, for a print the tiles that print first."""


# Not of the Tile level: what `lift` makes of assertions and prints, with the tiles' axis first in every operand.
report = Op(
    "grouped.report", _nothing, _nothing, STORAGE, False, _nothing, None, frozenset(("io",)), ("operands",),
    {k: p for k, p in inspect.signature(_nothing).parameters.items() if p.kind is p.KEYWORD_ONLY},
)  # fmt: skip


@lift(checks.assert_)
def _(group, node, args, run):
    condition, *values = args
    rank = len(condition.shape)
    wrong = group.add(elementwise.bitwise_not, group.whole(condition))
    active = group.running(rank)
    if active is not None:
        wrong = group.add(elementwise.bitwise_and, wrong, group.broadcast(active, sizes(wrong.type)))
    some = group.add(reduce.max, wrong, axis=tuple(range(-rank - 1, 0)), keepdims=False)
    says = {"kind": "assert", "text": node.attrs["message"]}
    reported(group, some, [group.seen(wrong, mask=True), *(group.seen(group.whole(v)) for v in values)], says)
    return []


@lift(checks.print_)
def _(group, node, args, run):
    active = group.full(True, bool_, group.size) if group.active is None else group.active
    says = {"kind": "print", "text": node.attrs["label"], "ordered": node.attrs["ordered"]}
    group.b.add(report, [group.seen(active, mask=True), *(group.seen(group.whole(p)) for p in args)], says)
    return []


def reported(group: Group, condition: Value, operands: Sequence[Value], says: dict[str, Any]) -> None:
    """A report where a condition holds."""

    def say() -> list[Value]:
        group.b.add(report, operands, says)
        return []

    group.b.add(control.if_, [condition], types=(), regions=(region(group, (), say), region(group, (), list)))
