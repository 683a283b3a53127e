"""Derivatives and batching of the basic ops. (Methods of Tensor stand for ops that are defined above this module.)"""

from __future__ import annotations

from tessera.op import batch, jvp, transpose
from tessera.ops.basic import broadcast_to, cast, full, stop_gradient
from tessera.ops.derivatives import linear, still
from tessera.types import as_dtype

jvp(full)(still)
jvp(broadcast_to)(linear(broadcast_to))


@jvp(cast)
def _(out, primals, tangents, *, dtype):
    return cast(tangents[0], dtype=dtype) if as_dtype(dtype).is_float else None


@jvp(stop_gradient)
def _(out, primals, tangents):
    return None


@transpose(cast)
def _(g, x, *, dtype):
    return (cast(g, dtype=x.policy or x.dtype),)


@transpose(broadcast_to)
def _(g, x, *, shape):
    new = g.ndim - x.rank
    spread = [i for i in range(g.ndim) if i < new or x.shape[i - new] != g.shape[i]]
    return (g.sum(axis=tuple(spread)).reshape(x.shape) if spread else g,)


@batch(stop_gradient)
def _(lanes):
    return stop_gradient(*lanes.tensors)


@batch(broadcast_to)
def _(lanes, *, shape):
    (x,) = lanes.tensors
    inner = (1,) * (len(shape) - x.ndim + 1) + x.shape[1:]
    return broadcast_to(x.reshape((lanes.size, *inner)), shape=(lanes.size, *shape))
