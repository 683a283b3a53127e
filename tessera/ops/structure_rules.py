"""Derivatives and batching of the ops that move elements."""

from __future__ import annotations

import math

from tessera.op import batch, jvp, transpose
from tessera.ops.basic import cast, splat
from tessera.ops.derivatives import linear, still, unknown
from tessera.ops.shape import concatenate, gather, iota, pad, permute, reshape, slice_
from tessera.tensor import Tensor
from tessera.types import int64

jvp(iota)(still)
jvp(reshape)(linear(reshape))
jvp(permute)(linear(permute))
jvp(slice_)(linear(slice_))
jvp(pad)(linear(pad, value=0))
jvp(concatenate)(linear(concatenate))


@jvp(gather)
def _(out, primals, tangents, *, axis):
    return gather(tangents[0], primals[1], axis=axis)


@transpose(reshape)
def _(g, x, *, shape):
    return (reshape(g, shape=x.shape),)


@transpose(permute)
def _(g, x, *, axes):
    return (permute(g, axes=tuple(axes.index(i) for i in range(len(axes)))),)


@transpose(slice_)
def _(g, x, *, start, stop, step):
    for axis, by in enumerate(step):
        g = _spaced(g, axis, by)
    # What was spaced ends up to `step - 1` places beyond the last element that was taken.
    room = tuple(max(0, a + n - size) for a, n, size in zip(start, g.shape, x.shape, strict=True))
    g = slice_(g, start=(0,) * g.ndim, stop=tuple(n - r for n, r in zip(g.shape, room, strict=True)))
    return (pad(g, low=start, high=tuple(s - a - n for s, a, n in zip(x.shape, start, g.shape, strict=True))),)


def _spaced(g: Tensor, axis: int, by: int) -> Tensor:
    """`g` with `by - 1` zeros after each element along an axis."""
    if by == 1:
        return g
    wide = reshape(g, shape=(*g.shape[: axis + 1], 1, *g.shape[axis + 1 :]))
    high = tuple(by - 1 if i == axis + 1 else 0 for i in range(wide.ndim))
    out = pad(wide, low=(0,) * wide.ndim, high=high)
    return reshape(out, shape=(*g.shape[:axis], g.shape[axis] * by, *g.shape[axis + 1 :]))


@transpose(pad)
def _(g, x, *, low, high, value):
    return (slice_(g, start=low, stop=tuple(a + s for a, s in zip(low, x.shape, strict=True))),)


@transpose(concatenate)
def _(g, *parts, axis):
    found: list[Tensor | None] = []
    at, begin = axis + g.ndim, 0
    for part in parts:
        end = begin + part.shape[axis]
        start = tuple(begin if i == at else 0 for i in range(g.ndim))
        stop = tuple(end if i == at else s for i, s in enumerate(g.shape))
        found.append(slice_(g, start=start, stop=stop) if unknown(part) else None)
        begin = end
    return tuple(found)


@transpose(gather)
def _(g, x, indices, *, axis):
    return splat(0, x).scatter_add(indices, g, axis=axis), None


@batch(reshape)
def _(lanes, *, shape):
    return reshape(*lanes.tensors, shape=(lanes.size, *shape))


@batch(permute)
def _(lanes, *, axes):
    return permute(*lanes.tensors, axes=(0, *(a + 1 for a in axes)))


@batch(slice_)
def _(lanes, *, start, stop, step):
    return slice_(*lanes.tensors, start=(0, *start), stop=(lanes.size, *stop), step=(1, *step))


@batch(pad)
def _(lanes, *, low, high, value):
    return pad(*lanes.tensors, low=(0, *low), high=(0, *high), value=value)


@batch(concatenate)
def _(lanes, *, axis):
    return concatenate(lanes.spread(), axis=axis)


@batch(gather)
def _(lanes, *, axis):
    x, indices = lanes.tensors
    if not lanes.batched[1]:
        return gather(x, indices, axis=axis)
    if not lanes.batched[0]:
        return axes_first(gather(x, indices, axis=axis), axis + x.ndim)
    # One long axis holds every lane's slices; a lane's indices begin where its slices do.
    at = axis + x.ndim
    flat, low = merge_lanes(x, at), x.shape[at]
    out = gather(flat, offset_lane_indices(indices, low), axis=0)
    return axes_from_front(out, at, indices.ndim)


def axes_first(x: Tensor, *axes: int) -> Tensor:
    """`x` with these axes before the others."""
    return permute(x, axes=(*axes, *(i for i in range(x.ndim) if i not in axes)))


def axes_from_front(x: Tensor, at: int, many: int) -> Tensor:
    """`x` with axes 1 to `many` moved to where `at` is, behind the lanes' other leading axes."""
    rest = [i for i in range(x.ndim) if i == 0 or i >= many]
    order = [*rest[:at], *range(1, many), *rest[at:]]
    return permute(x, axes=tuple(order))


def merge_lanes(x: Tensor, at: int) -> Tensor:
    """`x` [lanes, ..., n at `at`, ...] as [lanes * n, ...]."""
    front = axes_first(x, 0, at)
    return reshape(front, shape=(math.prod(front.shape[:2]), *front.shape[2:]))


def offset_lane_indices(indices: Tensor, low: int) -> Tensor:
    """Each lane's indices moved to that lane's part of the flattened axis."""
    wide = cast(indices, dtype=int64)
    return wide + iota(shape=wide.shape, axis=0) * low
