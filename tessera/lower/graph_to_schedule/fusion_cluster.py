"""Fusion clusters: kernels under construction, each its root, its iteration dims, and the points at which it reads each
value."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from tessera.core.symbolic_dim import Size, estimate_size
from tessera.ir.core import Node, Value
from tessera.lower.indexing_maps import (
    AccessPoint,
    IndexExpr,
    find_operand_points,
    find_reduced_axes,
    get_shape,
    make_index,
)


@dataclass
class FusionCluster:
    """A kernel under construction, which grows from its root towards the inputs.

    `extents` are the iteration dims: the root's axes, then those that reductions add. `wants` holds
    every value that is read and the points it is read at, in order. `row` is the dim that the reductions
    share; `product` says that there is a dot, of which there is at most one and never beside a row.
    """

    root: Value
    extents: list[Size]
    parallel: int
    access_points: dict[Value, dict[AccessPoint, None]] = field(default_factory=dict)
    inlined: set[Value] = field(default_factory=set)
    reduced: dict[Value, tuple[int, ...]] = field(default_factory=dict)
    row: int | None = None
    product: Value | None = None
    exports: dict[Value, AccessPoint] = field(default_factory=dict)  # values of each row that it stores besides

    @staticmethod
    def of(root: Value) -> FusionCluster:
        """The cluster that holds nothing but its root."""
        sizes = list(get_shape(root))
        start = FusionCluster(root, sizes, len(sizes))
        start.access_points[root] = {AccessPoint(tuple(start.index(d) for d in range(len(sizes)))): None}
        return start

    def index(self, dim: int) -> IndexExpr:
        """The index of one of its dims."""
        return make_index(dim, self.extents[dim])

    def points(self, value: Value) -> list[AccessPoint]:
        """Where a value is read."""
        return list(self.access_points.get(value, ()))

    def inline_node(self, node: Node) -> None:
        """Inline a node: its operands are read here, too."""
        self.inlined.add(node.out)
        for point in self.points(node.out):
            for operand, at in zip(node.args, self.operands(node, point), strict=True):
                self.access_points.setdefault(operand, {})[at] = None

    def operands(self, node: Node, point: AccessPoint) -> list[AccessPoint]:
        """The points at which a node computed here at `point` reads its operands."""
        return find_operand_points(node, point, [self.index(d) for d in self.reduced.get(node.out, ())])

    def find_unused_dims(self, point: AccessPoint) -> list[int]:
        """The parallel dims of more than one index that a point does not depend on."""
        return [d for d in range(self.parallel) if self.extents[d] != 1 and d not in point.dims]

    def count_recomputations(self, point: AccessPoint) -> int:
        """How often a value at a point is recomputed where programs share nothing."""
        return math.prod(estimate_size(self.extents[d]) for d in self.find_unused_dims(point) if d != self.row)

    @property
    def sums_rows(self) -> bool:
        """Whether its rows are reduced to numbers: no program stores a row."""
        return self.row is not None and self.row >= self.parallel and self.product is None

    def find_free_dim(self, points: Collection[AccessPoint], extent: Size) -> int | None:
        """A dim that a reduction at some points can share with others that have run along it before."""
        used = frozenset().union(*(p.dims for p in points))
        dims = range(self.parallel, len(self.extents))
        return next((d for d in dims if d not in used and self.extents[d] == extent), None)

    def add_reduction_dims(self, node: Node) -> None:
        """New dims for the axes that a node reduces."""
        first = len(self.extents)
        sizes = [get_shape(node.args[0])[axis] for axis in find_reduced_axes(node)]
        self.extents += sizes
        self.reduced[node.out] = tuple(range(first, first + len(sizes)))
