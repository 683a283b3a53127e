"""What the values of a mesh program take of an element's memory at most: those that are needed at one time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.ir.core import Block, Node, Value
from tessera.ops import basic, control, mesh, recompute, shape
from tessera.types import TensorType

# Results that lie where the first operand does: as another view of it, or in its place where nothing needs it later.
VIEWS = (shape.permute, shape.reshape, basic.broadcast_to, mesh.section, mesh.arrived, recompute.recompute)
IN_PLACE = (mesh.all_reduce, mesh.multiply_add, mesh.put)
FREE = (basic.full,)
# What comes has room for what comes next beside it: a loop that hands on what it begins to receive needs no more.
BEGUN = (mesh.begin_broadcast, mesh.begin_rotate)
ALWAYS = math.inf


def taken(value: Value) -> int:
    """The bytes of a value."""
    type = value.type
    return math.prod(map(int, type.shape)) * type.dtype.numpy.itemsize if isinstance(type, TensorType) else 0


def needed(block: Block) -> int:
    """The bytes that the values of a block take at most; its parameters and what comes from around it are not counted.

    What the host copies in stays, and what it copies out lies apart from that.
    """
    places = _Places(block)
    live = most = 0
    for number, node in enumerate(block.nodes):
        live += places.made(number, node)
        most = max(most, live + max(map(needed, node.regions), default=0))
        live -= places.ended(number, node)
    return most


class _Places:
    """Where values lie: by value one that stands for the place, by that the last node that needs it and its bytes."""

    def __init__(self, block: Block) -> None:
        self.place: dict[Value, Value] = {}
        self.last: dict[Value, float] = {}
        self.bytes: dict[Value, int] = dict.fromkeys(block.params, 0)
        self.kept: set[Value] = set()  # what the host copies
        self.handed_on = set(block.results)
        for number, node in enumerate(block.nodes):
            for value in node.results:
                first = node.args[0] if node.op in VIEWS and node.args else value
                self.place[value] = self.place.get(first, first)
            for value in (*node.args, *node.results, *(v for r in node.regions for v in r.free)):
                self._needs(value, ALWAYS if node.op in (mesh.read, mesh.write) else number)
        for value in block.results:
            self._needs(value, ALWAYS)

    def _needs(self, value: Value, number: float) -> None:
        at = self.place.get(value, value)
        self.last[at] = max(self.last.get(at, 0), number)

    def made(self, number: int, node: Node) -> int:
        """The bytes of new places for a node's results."""
        if node.op is mesh.write:  # what was read, or written before, is copied; else it is handed over as it lies
            at = self.place.get(node.args[1], node.args[1])
            copied = at in self.kept or not self.bytes.get(at)
            self.kept.add(at)
            return taken(node.args[1]) if copied else 0
        self.kept |= set(node.results) if node.op is mesh.read else set()
        pairs = zip(node.results, _replaced(node), strict=False)
        return sum(self._result(number, node, value, old) for value, old in pairs)

    def _result(self, number: int, node: Node, value: Value, old: Value | None) -> int:
        if self.place[value] is not value or node.op in FREE or (node.op in BEGUN and value in self.handed_on):
            return 0
        at = None if old is None else self.place.get(old, old)
        if at is not None and self.last.get(at) == number and at in self.bytes:
            self.last[at] = self.last[value]
            self._merge(value, at)
            return 0
        self.bytes[value] = taken(value) * (2 if node.op in BEGUN else 1)
        return self.bytes[value]

    def _merge(self, value: Value, at: Value) -> None:
        for each, place in self.place.items():
            if place is value:
                self.place[each] = at

    def ended(self, number: int, node: Node) -> int:
        """The bytes of places that nothing needs after a node."""
        used = {*node.args, *node.results, *(v for r in node.regions for v in r.free)}
        gone = {at for v in used if self.last.get(at := self.place.get(v, v)) == number}
        return sum(self.bytes.pop(at, 0) for at in gone)


def _replaced(node: Node) -> Sequence[Value | None]:
    """For each result the operand in whose place it may lie."""
    if node.op in (control.for_, control.while_):
        return node.args[len(node.args) - len(node.results) :]
    return [node.args[0] if node.op in IN_PLACE else None] * len(node.results)
