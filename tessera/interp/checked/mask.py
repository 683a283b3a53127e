"""Advice about masks: elements that a load left out (they read as 0, since it names no `other`) and that are used.

A mark follows them through pointwise ops and changes of shape. It goes where a mask or a choice leaves them out
again, and where zeros do no harm: in sums and products of blocks. Marks do not pass through loops and branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.interp.checked.report import Finding
from tessera.interp.machine import Machine
from tessera.interp.memory import expand
from tessera.ir.core import Node, Value
from tessera.op import Rules
from tessera.ops import basic, elementwise, linalg, reduce, shape, tile

if TYPE_CHECKING:
    from tessera.interp.checked.monitor import Monitor

rules = Rules("masked elements")
# Ops that make zero of zero.
_KEEP_ZERO = {elementwise.neg, elementwise.abs, elementwise.sqrt, elementwise.mul, basic.cast, elementwise.floor,
              elementwise.ceil, elementwise.sin, elementwise.tanh}  # fmt: skip
_HARMLESS = (reduce.sum, linalg.dot)


@dataclass
class Marks:
    """The elements that a mask has left out, whether they are still 0, where, and for which box of instances."""

    out: np.ndarray
    zero: bool
    load: Node
    box: tuple[Any, ...]


class Masks:
    """The marks of a launch, by value."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.marks: dict[Value, Marks] = {}

    def follow(self, machine: Machine, node: Node, args: Sequence[Any], again: Callable[[list[Any]], Any]) -> None:
        """What becomes of the marks of a node's operands; `again(args)` runs it on other operands."""
        if node.op is tile.load or node.op is tile.gather:
            self._load(machine, node, args)
            return
        box = (machine.first, machine.count)
        found = {i: m for i, v in enumerate(node.args) if (m := self.marks.get(v)) is not None and m.box == box}
        for value in node.results:
            self.marks.pop(value, None)
        if found and not node.regions:
            rule = rules.get(node.op)
            if rule is not None:
                rule(self, machine, node, args, found, again)
            elif node.op.pointwise:
                self._pointwise(node, found)

    def _load(self, machine: Machine, node: Node, args: Sequence[Any]) -> None:
        self.marks.pop(node.out, None)
        mask = 1 + node.args[0].type.rank  # type: ignore[union-attr]
        if len(args) != mask + 1:  # none, or with `other`
            return
        out = ~np.asarray(machine.arrays([args[mask]])[0])
        if out.any():
            self.marks[node.out] = Marks(out, True, node, (machine.first, machine.count))

    def _pointwise(self, node: Node, found: dict[int, Marks]) -> None:
        marks = list(found.values())
        out = marks[0].out
        for each in marks[1:]:
            out = out | each.out
        self.marks[node.out] = Marks(
            out, node.op in _KEEP_ZERO and all(m.zero for m in marks), marks[0].load, marks[0].box
        )

    def use(self, machine: Machine, node: Node, marks: Marks, used: np.ndarray, what: str) -> None:
        """Report elements of a value that should not be used."""
        if machine.active is not None:
            used = used & expand(machine.active, used.ndim - machine.rank)
        if used.any():
            lane = tuple(int(i) for i in np.argwhere(used)[0])
            who = self.monitor.name(self.monitor.who(machine, tuple(
                i if n > 1 else 0 for i, n in zip(lane, machine.count, strict=False)
            )))  # fmt: skip
            message = f"{what} element {lane[machine.rank :]} that the mask of a load left out: {who}"
            suggestion = "give the load `other=`, the value that does no harm here, or mask this too"
            self.monitor.found(Finding("outside mask", message, node.loc, marks.load.loc, suggestion))


@rules(shape.reshape, shape.permute, basic.broadcast_to)
def _(masks, machine, node, args, found, again):
    marks = found[0]
    if marks.out.ndim != np.ndim(args[0]):
        return
    out = np.broadcast_to(marks.out, np.broadcast_shapes(marks.out.shape, np.shape(args[0])))
    masks.marks[node.out] = Marks(again([out])[0], marks.zero, marks.load, marks.box)


@rules(elementwise.where)
def _(masks, machine, node, args, found, again):
    condition = np.asarray(machine.arrays([args[0]])[0])
    parts = [(m.out & (condition if i == 1 else ~condition), m) for i, m in found.items() if i > 0]
    kept = [(out, m) for out, m in parts if out.any()]
    if kept:
        out = kept[0][0] if len(kept) == 1 else kept[0][0] | kept[1][0]
        masks.marks[node.out] = Marks(out, False, kept[0][1].load, kept[0][1].box)


@rules(
    basic.cast, reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin, reduce.mean, reduce.var, linalg.dot
)
def _(masks, machine, node, args, found, again):
    for marks in found.values():
        if not (marks.zero and node.op in _HARMLESS):
            masks.use(machine, node, marks, marks.out, f"{node.op.name} takes")


@rules(tile.store, tile.scatter)
def _(masks, machine, node, args, found, again):
    if 1 not in found:
        return
    rank = node.args[0].type.rank
    used = found[1].out
    if len(args) > 2 + rank:
        used = used & np.asarray(machine.arrays([args[2 + rank]])[0])
    masks.use(machine, node, found[1], used, "a store writes")
