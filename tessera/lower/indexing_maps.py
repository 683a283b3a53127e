"""Indexing maps: which elements of its operands each Graph op reads (MLIR linalg's indexing maps).

An access point is an index into a tensor and the guards under which it is read: outside them the element does not
exist, and the value is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.core.types import TensorType
from tessera.ir.core import Node, Value
from tessera.ir.rules import REGISTRY, Rules
from tessera.lower.affine import (
    ZERO,
    IndexExpr,
    OpaqueIndex,
    add_exprs,
    delinearise,
    linearise,
    make_atom,
    make_constant,
    scale_expr,
)
from tessera.ops.tensor import basic, contractions, reduce, shape
from tessera.ops.tensor.basic import recompute

POINTWISE = tuple(o for o in REGISTRY.values() if o.pointwise)
REDUCTIONS = (reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)


@dataclass(frozen=True)
class IndexGuard:
    """A bounds check: an index is from `low` to below `high`."""

    index: IndexExpr
    low: int
    high: int


@dataclass(frozen=True)
class AccessPoint:
    """An access to a tensor: its indices, and the guards under which it is read."""

    indices: tuple[IndexExpr, ...]
    guards: tuple[IndexGuard, ...] = ()

    @property
    def dims(self) -> frozenset[int]:
        """The dims that the index depends on."""
        return frozenset().union(*(e.dims for e in self.indices))

    def axes_along(self, dim: int) -> tuple[int, ...]:
        """The axes whose index depends on a dim."""
        return tuple(a for a, e in enumerate(self.indices) if dim in e.dims)

    @property
    def is_clean(self) -> bool:
        """Whether the indices consist of digits only."""
        return all(e.is_clean for e in self.indices)

    def moved(self, indices: Sequence[IndexExpr], *guards: IndexGuard) -> AccessPoint:
        """The access at other indices, under these guards and more."""
        return AccessPoint(tuple(indices), self.guards + tuple(g for g in guards if g not in self.guards))


# rule(node, point, reduced): a point for each operand; `reduced` are the indices of the reduced axes.
indexing_rules = Rules("index")


def find_operand_points(node: Node, point: AccessPoint, reduced: Sequence[IndexExpr] = ()) -> list[AccessPoint]:
    """The point at which each operand is read."""
    return indexing_rules.of(node.op)(node, point, reduced)


def get_tensor_type(value: Value) -> TensorType:
    """The type of a tensor or block."""
    assert isinstance(value.type, TensorType)
    return value.type


def get_shape(value: Value) -> tuple[int, ...]:
    """The concrete shape of a tensor."""
    return tuple(int(s) for s in get_tensor_type(value).shape)


@indexing_rules(*POINTWISE, recompute)
def _(node, point, reduced):
    return [point] * len(node.args)


@indexing_rules(basic.full, shape.iota)
def _(node, point, reduced):
    return []


@indexing_rules(basic.broadcast_to)
def _(node, point, reduced):
    sizes = get_shape(node.args[0])
    tail = point.indices[len(point.indices) - len(sizes) :]
    return [point.moved([ZERO if n == 1 else i for i, n in zip(tail, sizes, strict=True)])]


@indexing_rules(shape.reshape)
def _(node, point, reduced):
    return [point.moved(delinearise(linearise(point.indices, get_shape(node.out)), get_shape(node.args[0])))]


@indexing_rules(shape.permute)
def _(node, point, reduced):
    axes = node.attrs["axes"]
    return [point.moved([point.indices[axes.index(a)] for a in range(len(axes))])]


@indexing_rules(shape.slice_)
def _(node, point, reduced):
    steps = zip(point.indices, node.attrs["start"], node.attrs["step"], strict=True)
    return [point.moved([add_exprs(scale_expr(i, by), make_constant(low)) for i, low, by in steps])]


def make_bounds_guard(index: IndexExpr, size: int) -> tuple[IndexGuard, ...]:
    """The bounds check of an index; none where it is proven."""
    return () if index.within(0, size) else (IndexGuard(index, 0, size),)


@indexing_rules(shape.pad)
def _(node, point, reduced):
    moved = [add_exprs(i, make_constant(-low)) for i, low in zip(point.indices, node.attrs["low"], strict=True)]
    guards = [g for i, n in zip(moved, get_shape(node.args[0]), strict=True) for g in make_bounds_guard(i, n)]
    return [point.moved(moved, *guards)]


@indexing_rules(shape.concatenate)
def _(node, point, reduced):
    axis, start, found = node.attrs["axis"], 0, []
    for each in node.args:
        size = get_shape(each)[axis]
        moved = list(point.indices)
        moved[axis] = add_exprs(moved[axis], make_constant(-start))
        found.append(point.moved(moved, *make_bounds_guard(moved[axis], size)))
        start += size
    return found


@indexing_rules(shape.gather)
def _(node, point, reduced):
    x, places = node.args
    first = len(get_shape(x)) + node.attrs["axis"]
    last = first + len(get_shape(places))
    at = point.moved(point.indices[first:last])
    place = make_atom(OpaqueIndex((places, at), at.dims))
    return [point.moved([*point.indices[:first], place, *point.indices[last:]]), at]


@indexing_rules(*REDUCTIONS)
def _(node, point, reduced):
    axes = find_reduced_axes(node)
    kept = iter(point.indices)
    along = iter(reduced)
    indices = []
    for axis in range(len(get_shape(node.args[0]))):
        if axis in axes and node.attrs["keepdims"]:
            next(kept)
        indices.append(next(along) if axis in axes else next(kept))
    return [point.moved(indices)]


@indexing_rules(contractions.dot)
def _(node, point, reduced):
    (*batch, m, n), (k,) = point.indices, reduced
    return [point.moved([*batch, m, k]), point.moved([*batch, k, n])]


def find_reduced_axes(node: Node) -> tuple[int, ...]:
    """The axes (from 0) of its first operand that a node reduces."""
    rank = len(get_shape(node.args[0]))
    if node.op is contractions.dot:
        return (rank - 1,)
    axis = node.attrs["axis"]
    listed = axis if isinstance(axis, tuple) else (axis,)
    return tuple(a + rank for a in listed)
