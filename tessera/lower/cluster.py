"""Cluster: one kernel to be, the values it computes, and at which points of its iteration dims."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tessera.ir.core import Node, Value
from tessera.lower.affine import Expr, index
from tessera.lower.points import Point, operand_points, reduced_axes, shape_of


@dataclass
class Cluster:
    """A kernel that grows from its root towards the inputs, consumers first.

    `extents` are the iteration dims: the root's axes, then those that reductions add. `wants` holds
    every value that is read and the points it is read at, in order. `row` is the dim that the reductions
    share; `product` says that there is a dot, of which there is at most one and never beside a row.
    """

    root: Value
    extents: list[int]
    parallel: int
    wants: dict[Value, dict[Point, None]] = field(default_factory=dict)
    inlined: set[Value] = field(default_factory=set)
    reduced: dict[Value, tuple[int, ...]] = field(default_factory=dict)
    row: int | None = None
    product: Value | None = None

    @staticmethod
    def of(root: Value) -> Cluster:
        """The cluster that holds nothing but its root."""
        sizes = list(shape_of(root))
        start = Cluster(root, sizes, len(sizes))
        start.wants[root] = {Point(tuple(start.index(d) for d in range(len(sizes)))): None}
        return start

    def index(self, dim: int) -> Expr:
        """The index of one of its dims."""
        return index(dim, self.extents[dim])

    def points(self, value: Value) -> list[Point]:
        """Where a value is read."""
        return list(self.wants.get(value, ()))

    def take(self, node: Node) -> None:
        """Compute a node here: what it reads is wanted, too."""
        self.inlined.add(node.out)
        for point in self.points(node.out):
            for operand, at in zip(node.args, self.operands(node, point), strict=True):
                self.wants.setdefault(operand, {})[at] = None

    def operands(self, node: Node, point: Point) -> list[Point]:
        """The points at which a node computed here at `point` reads its operands."""
        return operand_points(node, point, [self.index(d) for d in self.reduced.get(node.out, ())])

    def unused(self, point: Point) -> list[int]:
        """The parallel dims of more than one index that a point does not depend on."""
        return [d for d in range(self.parallel) if self.extents[d] > 1 and d not in point.dims]

    def repeats(self, point: Point) -> int:
        """How often a value at a point would be computed anew if nothing were shared between programs."""
        return math.prod(self.extents[d] for d in self.unused(point) if d != self.row)

    def add_dims(self, node: Node) -> None:
        """New dims for the axes that a node reduces."""
        first = len(self.extents)
        sizes = [shape_of(node.args[0])[axis] for axis in reduced_axes(node)]
        self.extents += sizes
        self.reduced[node.out] = tuple(range(first, first + len(sizes)))
