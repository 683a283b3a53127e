"""Derivatives and batching of the ops that move elements: basic and shape. (A transpose is often a reduction.)"""

from __future__ import annotations

import math

from tessera.op import batch, jvp, transpose
from tessera.ops import basic, shape
from tessera.ops.basic import broadcast_to, cast, splat
from tessera.ops.derivatives import dense, linear, still, unknown
from tessera.ops.reduce import sum
from tessera.ops.shape import concatenate, gather, iota, pad, permute, reshape, slice_
from tessera.ops.update import scatter_add
from tessera.tensor import Tensor
from tessera.types import as_dtype

jvp(basic.full, shape.iota)(still)
jvp(broadcast_to)(linear(broadcast_to))
jvp(reshape)(linear(reshape))
jvp(permute)(linear(permute))
jvp(slice_)(linear(slice_))
jvp(pad)(linear(pad, value=0))
jvp(concatenate)(linear(concatenate))


@jvp(cast)
def _(out, primals, tangents, *, dtype):
    return cast(tangents[0], dtype=dtype) if as_dtype(dtype).is_float else None


@jvp(basic.stop_gradient)
def _(out, primals, tangents):
    return None


@jvp(gather)
def _(out, primals, tangents, *, axis):
    return gather(tangents[0], primals[1], axis=axis)


@jvp(scatter_add)
def _(out, primals, tangents, *, axis):
    x, indices, updates = primals
    return scatter_add(dense(tangents[0], x.type), indices, dense(tangents[2], updates.type), axis=axis)


@transpose(cast)
def _(g, x, *, dtype):
    return (cast(g, dtype=x.policy or x.dtype),)


@transpose(broadcast_to)
def _(g, x, *, shape):
    new = g.ndim - x.rank
    spread = [i for i in range(g.ndim) if i < new or x.shape[i - new] != g.shape[i]]
    return (reshape(sum(g, axis=tuple(spread)), shape=x.shape) if spread else g,)


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
    return scatter_add(splat(0, x), indices, g, axis=axis), None


@transpose(scatter_add)
def _(g, x, indices, updates, *, axis):
    return (g if unknown(x) else None), None, (gather(g, indices, axis=axis) if unknown(updates) else None)


@batch(basic.stop_gradient)
def _(lanes):
    return basic.stop_gradient(*lanes.tensors)


@batch(broadcast_to)
def _(lanes, *, shape):
    (x,) = lanes.tensors
    inner = (1,) * (len(shape) - x.ndim + 1) + x.shape[1:]
    return broadcast_to(reshape(x, shape=(lanes.size, *inner)), shape=(lanes.size, *shape))


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
        return _first(gather(x, indices, axis=axis), axis + x.ndim)
    # One long axis holds every lane's slices; a lane's indices begin where its slices do.
    at = axis + x.ndim
    flat, low = _flattened(x, at), x.shape[at]
    out = gather(flat, _offset(indices, low), axis=0)
    return _from_front(out, at, indices.ndim)


@batch(scatter_add)
def _(lanes, *, axis):
    x, indices, updates = lanes.spread()
    if not lanes.batched[1]:
        return scatter_add(x, lanes.tensors[1], updates, axis=axis)
    at = axis + x.ndim
    front = _first(updates, 0, *range(at, at + indices.ndim - 1))
    out = scatter_add(_flattened(x, at), _offset(indices, x.shape[at]), front, axis=0)
    split = reshape(out, shape=(lanes.size, x.shape[at], *out.shape[1:]))
    return _from_front(split, at, 2)


def _first(x: Tensor, *axes: int) -> Tensor:
    """`x` with these axes before the others."""
    return permute(x, axes=(*axes, *(i for i in range(x.ndim) if i not in axes)))


def _from_front(x: Tensor, at: int, many: int) -> Tensor:
    """`x` with axes 1 to `many` moved to where `at` is, behind the lanes' other leading axes."""
    rest = [i for i in range(x.ndim) if i == 0 or i >= many]
    order = [*rest[:at], *range(1, many), *rest[at:]]
    return permute(x, axes=tuple(order))


def _flattened(x: Tensor, at: int) -> Tensor:
    """`x` [lanes, ..., n at `at`, ...] as [lanes * n, ...]."""
    front = _first(x, 0, at)
    return reshape(front, shape=(math.prod(front.shape[:2]), *front.shape[2:]))


def _offset(indices: Tensor, low: int) -> Tensor:
    """Each lane's indices moved to that lane's part of the flattened axis."""
    wide = cast(indices, dtype=shape.int64)
    return wide + iota(shape=wide.shape, axis=0) * low
