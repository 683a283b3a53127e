"""What each op of a graph becomes on a mesh: work on pieces, and what elements must tell each other."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes

from tessera.ir.core import Node, Value
from tessera.lower.mesh.lowering import Lowering, count
from tessera.lower.mesh.pieces import CONSTANT, OPEN, Held, Split, common, tensor
from tessera.op import REGISTRY, Rules
from tessera.ops import basic, mesh, neighbour, reduce, shape
from tessera.ops.mesh import WHOLE
from tessera.types import TensorType, bool_, f32

# rule(lowering, node, *held) gives the Held of the node's result.
rules = Rules("mesh")


@rules(*(op for op in REGISTRY.values() if op.pointwise))
def _(lowering, node, *operands):
    split = common([x.split for x in operands])
    if split is None:  # cut against each other: as the one is of which most would have to move
        settled = [(x, lowering.settle(x)) for x in operands]
        split = max(settled, key=lambda pair: math.prod(lowering.mesh.local(pair[0].type, pair[1]).shape))[1]

    def make(wanted: Split) -> Value:
        return lowering.builder.add(node.op, [x.at(wanted) for x in operands], node.attrs).out

    if OPEN in split:
        return Held(node.out.type, split, make)
    value = make(split)
    lowering.cycles += 24 + count(value)
    return lowering.hold(node, split, value)


@rules(basic.full)
def _(lowering, node):
    one = lowering.full(node.out.type.with_shape((1,) * node.out.type.rank), node.attrs["value"])
    return lowering.hold(node, (CONSTANT,) * node.out.type.rank, one)


@rules(shape.iota)
def _(lowering, node):
    axis, type = node.attrs["axis"] % node.out.type.rank, node.out.type

    def make(wanted: Split) -> Value:
        local = lowering.mesh.local(type, wanted)
        return lowering.repeated(lowering.places(local, axis, wanted[axis], type.dtype), local)

    return Held(type, tuple(OPEN if a == axis else CONSTANT for a in range(type.rank)), make)


@rules(basic.broadcast_to)
def _(lowering, node, x):
    type, extra = node.out.type, node.out.type.rank - x.type.rank
    kept = [int(n) == int(m) for n, m in zip(x.type.shape, type.shape[extra:], strict=True)]
    split = (CONSTANT,) * extra + tuple(s if same else CONSTANT for s, same in zip(x.split, kept, strict=True))

    def make(wanted: Split) -> Value:
        inner = tuple(w if same else CONSTANT for w, same in zip(wanted[extra:], kept, strict=True))
        value = x.at(inner)
        if extra:
            value = lowering.add(shape.reshape, value, shape=(1,) * extra + tuple(value.type.shape))
        return lowering.repeated(value, lowering.mesh.local(type, wanted))

    return Held(type, split, make, x.clean)


@rules(shape.permute)
def _(lowering, node, x):
    axes = [a % x.type.rank for a in node.attrs["axes"]]

    def make(wanted: Split) -> Value:
        inner = tuple(wanted[axes.index(a)] for a in range(len(axes)))
        return lowering.add(shape.permute, x.at(inner), axes=tuple(axes))

    return Held(node.out.type, tuple(x.split[a] for a in axes), make, x.clean)


@rules(shape.reshape)
def _(lowering, node, x):
    pairs = _groups(x.type.shape, node.out.type.shape)
    merged = [a for before, after in pairs if not (len(before) == len(after) == 1) for a in before]
    source = lowering.whole(x, merged)
    split = [CONSTANT] * node.out.type.rank
    for before, after in pairs:
        for axis in after:
            split[axis] = source[before[0]] if len(before) == len(after) == 1 else WHOLE
    wanted = lowering.mesh.local(node.out.type, tuple(split))
    value = lowering.add(shape.reshape, x.at(source), shape=tuple(wanted.shape))
    return lowering.hold(node, tuple(split), value)


def _groups(before: Any, after: Any) -> list[tuple[list[int], list[int]]]:
    """Axes of a shape and of its reshape that hold the same elements; axes of size 1 are in none."""
    left = [a for a, n in enumerate(before) if int(n) != 1]
    right = [a for a, n in enumerate(after) if int(n) != 1]
    found = []
    while left:
        one, other = [left.pop(0)], [right.pop(0)]
        sizes = [int(before[one[0]]), int(after[other[0]])]
        while sizes[0] != sizes[1]:
            short = sizes[0] > sizes[1]
            axis = (right if short else left).pop(0)
            (other if short else one).append(axis)
            sizes[short] *= int((after if short else before)[axis])
        found.append((one, other))
    return found


@rules(reduce.sum, reduce.max, reduce.min)
def _(lowering, node, x):
    axes, kind = [a % x.type.rank for a in node.attrs["axis"]], node.op.__name__
    split = list(lowering.settle(x))
    for axis in axes:
        if split[axis] == CONSTANT and int(x.type.shape[axis]) > 1:
            split[axis] = WHOLE
    value, short = x.at(tuple(split)), x.type.dtype.is_float and x.type.dtype.bits < 16
    if short:  # what leaves a maximum as it is may be none of its numbers
        value = lowering.add(basic.cast, value, dtype=f32)
    for axis in axes:
        value = lowering.filled(x, tuple(split), axis, identity(kind, x.type), value)
    summed = kind == "sum" and x.type.dtype.is_float
    wide = x.type.accumulate if summed else f32 if short else node.out.type.dtype
    if value.type.dtype != wide:
        value = lowering.add(basic.cast, value, dtype=wide)
    value = lowering.add(node.op, value, axis=node.attrs["axis"], keepdims=node.attrs["keepdims"])
    value = joined(lowering, value, [split[a] for a in axes], kind)
    if value.type.dtype != node.out.type.dtype:
        value = lowering.add(basic.cast, value, dtype=node.out.type.dtype)
    left = [CONSTANT if a in axes else s for a, s in enumerate(split) if a not in axes or node.attrs["keepdims"]]
    return lowering.hold(node, tuple(left), value)


def joined(lowering: Lowering, value: Value, cuts: list[int], kind: str) -> Value:
    """What the elements along the cut axes found, put together."""
    for cut in cuts:
        if cut >= 0:
            value = lowering.add(mesh.all_reduce, value, axis=cut, kind=kind)
            lowering.cycles += 3 * count(value) + 8 * lowering.mesh.grid[cut]
    return value


def identity(kind: str, type: TensorType) -> float:
    """What leaves a sum, maximum or minimum as it is."""
    if kind == "sum":
        return 0
    if type.dtype.is_float:
        return float("-inf") if kind == "max" else float("inf")
    if type.dtype == bool_:
        return kind == "min"
    info = ml_dtypes.iinfo(type.dtype.numpy)
    return info.min if kind == "max" else info.max


@rules(neighbour.mesh_shift)
def _(lowering, node, x):
    axis, shift = node.attrs["axis"], node.attrs["shift"]
    split = lowering.settle(x)
    cut = split[axis]
    if cut == CONSTANT and shift:  # of size 1: nobody has a neighbour
        return lowering.hold(node, split, lowering.full(lowering.mesh.local(node.out.type, split), 0))
    value = lowering.filled(x, split, axis % x.type.rank, 0)
    for _ in range(min(abs(shift), int(x.type.shape[axis]))):
        value = _next(lowering, value, axis, cut, 1 if shift > 0 else -1)
    return lowering.hold(node, split, value)


def _next(lowering: Lowering, value: Value, axis: int, cut: int, offset: int) -> Value:
    """A piece moved by one place, the neighbour's edge or zeros coming in."""
    length = int(value.type.shape[axis])
    edge = lowering.add(mesh.panel, value, lowering.index(length - 1 if offset > 0 else 0), axis=axis, count=length)
    if cut >= 0:
        edge = lowering.add(mesh.shift, edge, axis=cut, offset=offset)
    else:
        edge = lowering.full(tensor(edge), 0)
    return lowering.add(mesh.halo, value, edge, axis=axis, offset=offset)


def refuse(lowering: Lowering, node: Node) -> Held:
    """For an op without a row."""
    raise lowering.refusal(f"{node.op.name} has no rule there")
