"""Which elements of its operands an op reads: the pull of an index through every Graph op.

A Point is an index into a tensor and the guards under which it is read at all: outside them the
element does not exist and whatever comes back is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.ir.core import Node, Value
from tessera.lower.affine import ZERO, Expr, Opaque, add, atom, const, linear, scale, unravel
from tessera.op import REGISTRY, Rules
from tessera.ops import basic, linalg, reduce, shape
from tessera.ops.recompute import recompute
from tessera.types import TensorType

POINTWISE = tuple(o for o in REGISTRY.values() if o.pointwise)
REDUCTIONS = (reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)


@dataclass(frozen=True)
class Guard:
    """That an index lies from `low` to before `high`."""

    index: Expr
    low: int
    high: int


@dataclass(frozen=True)
class Point:
    """An index into a tensor, and the guards under which it is read."""

    indices: tuple[Expr, ...]
    guards: tuple[Guard, ...] = ()

    @property
    def dims(self) -> frozenset[int]:
        """The dims that the index depends on."""
        return frozenset().union(*(e.dims for e in self.indices))

    def axes_along(self, dim: int) -> tuple[int, ...]:
        """The axes whose index depends on a dim."""
        return tuple(a for a, e in enumerate(self.indices) if dim in e.dims)

    @property
    def is_clean(self) -> bool:
        """Whether the index is made of digits only."""
        return all(e.is_clean for e in self.indices)

    def moved(self, indices: Sequence[Expr], *guards: Guard) -> Point:
        """Another index under these guards and more."""
        return Point(tuple(indices), self.guards + tuple(g for g in guards if g not in self.guards))


# rule(node, point, reduced): a point for each operand; `reduced` are the indices of the reduced axes.
points = Rules("index")


def operand_points(node: Node, point: Point, reduced: Sequence[Expr] = ()) -> list[Point]:
    """The point at which each operand is read."""
    return points.of(node.op)(node, point, reduced)


def type_of(value: Value) -> TensorType:
    """The type of a tensor or block."""
    assert isinstance(value.type, TensorType)
    return value.type


def shape_of(value: Value) -> tuple[int, ...]:
    """The concrete shape of a tensor."""
    return tuple(int(s) for s in type_of(value).shape)


@points(*POINTWISE, recompute)
def _(node, point, reduced):
    return [point] * len(node.args)


@points(basic.full, shape.iota)
def _(node, point, reduced):
    return []


@points(basic.broadcast_to)
def _(node, point, reduced):
    sizes = shape_of(node.args[0])
    tail = point.indices[len(point.indices) - len(sizes) :]
    return [point.moved([ZERO if n == 1 else i for i, n in zip(tail, sizes, strict=True)])]


@points(shape.reshape)
def _(node, point, reduced):
    return [point.moved(unravel(linear(point.indices, shape_of(node.out)), shape_of(node.args[0])))]


@points(shape.permute)
def _(node, point, reduced):
    axes = node.attrs["axes"]
    return [point.moved([point.indices[axes.index(a)] for a in range(len(axes))])]


@points(shape.slice_)
def _(node, point, reduced):
    steps = zip(point.indices, node.attrs["start"], node.attrs["step"], strict=True)
    return [point.moved([add(scale(i, by), const(low)) for i, low, by in steps])]


def inside(index: Expr, size: int) -> tuple[Guard, ...]:
    """The guard that an index lies in an axis; none where it is sure to."""
    return () if index.within(0, size) else (Guard(index, 0, size),)


@points(shape.pad)
def _(node, point, reduced):
    moved = [add(i, const(-low)) for i, low in zip(point.indices, node.attrs["low"], strict=True)]
    guards = [g for i, n in zip(moved, shape_of(node.args[0]), strict=True) for g in inside(i, n)]
    return [point.moved(moved, *guards)]


@points(shape.concatenate)
def _(node, point, reduced):
    axis, start, found = node.attrs["axis"], 0, []
    for each in node.args:
        size = shape_of(each)[axis]
        moved = list(point.indices)
        moved[axis] = add(moved[axis], const(-start))
        found.append(point.moved(moved, *inside(moved[axis], size)))
        start += size
    return found


@points(shape.gather)
def _(node, point, reduced):
    x, places = node.args
    first = len(shape_of(x)) + node.attrs["axis"]
    last = first + len(shape_of(places))
    at = point.moved(point.indices[first:last])
    place = atom(Opaque((places, at), at.dims))
    return [point.moved([*point.indices[:first], place, *point.indices[last:]]), at]


@points(*REDUCTIONS)
def _(node, point, reduced):
    axes = reduced_axes(node)
    kept = iter(point.indices)
    along = iter(reduced)
    indices = []
    for axis in range(len(shape_of(node.args[0]))):
        if axis in axes and node.attrs["keepdims"]:
            next(kept)
        indices.append(next(along) if axis in axes else next(kept))
    return [point.moved(indices)]


@points(linalg.dot)
def _(node, point, reduced):
    (*batch, m, n), (k,) = point.indices, reduced
    return [point.moved([*batch, m, k]), point.moved([*batch, k, n])]


def reduced_axes(node: Node) -> tuple[int, ...]:
    """The axes (from 0) of its first operand that a node takes away by combining."""
    rank = len(shape_of(node.args[0]))
    if node.op is linalg.dot:
        return (rank - 1,)
    axis = node.attrs["axis"]
    listed = axis if isinstance(axis, tuple) else (axis,)
    return tuple(a + rank for a in listed)
