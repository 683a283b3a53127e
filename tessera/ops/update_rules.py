"""Derivatives and batching of `scatter_add`."""

from __future__ import annotations

from tessera.op import batch, jvp, transpose
from tessera.ops.derivatives import dense, unknown
from tessera.ops.shape import gather, reshape
from tessera.ops.structure_rules import axes_first, axes_from_front, merge_lanes, offset_lane_indices
from tessera.ops.update import scatter_add


@jvp(scatter_add)
def _(out, primals, tangents, *, axis):
    x, indices, updates = primals
    return scatter_add(dense(tangents[0], x.type), indices, dense(tangents[2], updates.type), axis=axis)


@transpose(scatter_add)
def _(g, x, indices, updates, *, axis):
    return (g if unknown(x) else None), None, (gather(g, indices, axis=axis) if unknown(updates) else None)


@batch(scatter_add)
def _(lanes, *, axis):
    x, indices, updates = lanes.spread()
    if not lanes.batched[1]:
        return scatter_add(x, lanes.tensors[1], updates, axis=axis)
    at = axis + x.ndim
    front = axes_first(updates, 0, *range(at, at + indices.ndim - 1))
    out = scatter_add(merge_lanes(x, at), offset_lane_indices(indices, x.shape[at]), front, axis=0)
    split = reshape(out, shape=(lanes.size, x.shape[at], *out.shape[1:]))
    return axes_from_front(split, at, 2)
