"""Slices, padding, concatenation and gathering on a mesh: along the axes they change, every element has the whole."""

from __future__ import annotations

from tessera.ir.core import Value
from tessera.lower.mesh.lowering import Lowering
from tessera.lower.mesh.pieces import CONSTANT, Held, Split, tensor
from tessera.lower.mesh.rules import rules
from tessera.ops import mesh, recompute, shape
from tessera.ops.mesh import WHOLE
from tessera.types import TensorType


@rules(shape.slice_)
def _(lowering, node, x):
    known, sizes = node.attrs, [int(n) for n in x.type.shape]
    ranges = list(zip(known["start"], known["stop"], known["step"], strict=True))
    changed = [a for a, (n, r) in enumerate(zip(sizes, ranges, strict=True)) if r != (0, n, 1)]
    split = lowering.whole(x, changed)
    value = x.at(split)
    local = [r if a in changed else (0, int(value.type.shape[a]), 1) for a, r in enumerate(ranges)]
    start, stop, step = (tuple(r[i] for r in local) for i in range(3))
    value = lowering.add(mesh.section, value, start=start, stop=stop, step=step)
    return lowering.hold(node, _of_ones(split, node.out.type), value)


def _of_ones(split: Split, type: TensorType) -> Split:
    """A split with what is whole and has one element as constant."""
    return tuple(CONSTANT if s == WHOLE and int(n) == 1 else s for s, n in zip(split, type.shape, strict=True))


@rules(shape.pad)
def _(lowering, node, x):
    low, high, rank = node.attrs["low"], node.attrs["high"], x.type.rank
    changed = [a for a in range(rank) if low[a] or high[a]]
    split = _filled_axes(lowering.whole(x, changed), changed)
    value = x.at(split)
    for axis in changed:
        ends = [_slab(lowering, value, axis, n, node.attrs["value"]) for n in (low[axis], high[axis])]
        parts = [part for part in (ends[0], value, ends[1]) if part is not None]
        value = lowering.add(mesh.join, *parts, axis=axis - rank)
    return lowering.hold(node, split, value)


def _filled_axes(split: Split, axes: list[int]) -> Split:
    """A split with some axes whole that were constant."""
    return tuple(WHOLE if a in axes else s for a, s in enumerate(split))


def _slab(lowering: Lowering, like: Value, axis: int, length: int, fill: float) -> Value | None:
    sizes = tuple(length if a == axis else int(n) for a, n in enumerate(like.type.shape))
    return lowering.full(tensor(like).with_shape(sizes), fill) if length else None


@rules(shape.concatenate)
def _(lowering, node, *operands):
    axis = node.attrs["axis"] % node.out.type.rank
    widest = max(operands, key=lambda x: int(x.type.shape[axis]))
    split = _filled_axes(lowering.whole(widest, [axis]), [axis])
    value = lowering.add(mesh.join, *(x.at(split) for x in operands), axis=node.attrs["axis"])
    return lowering.hold(node, split, value)


@rules(shape.gather)
def _(lowering, node, x, indices):
    axis = node.attrs["axis"] % x.type.rank
    split = _filled_axes(lowering.whole(x, [axis]), [axis])
    chosen = tuple(WHOLE if s in split else s for s in lowering.settle(indices))
    places = indices.at(chosen)
    for place in range(len(chosen)):  # past the end stands what names an element too
        places = lowering.filled(indices, chosen, place, 0, places)
    value = lowering.add(mesh.pick, x.at(split), places, axis=node.attrs["axis"])
    return lowering.hold(node, (*split[:axis], *chosen, *split[axis + 1 :]), value)


@rules(recompute.recompute)
def _(lowering, node, x):
    # A mesh keeps nothing for a way back: every value is computed once.
    return Held(x.type, x.split, x.at, x.clean)
