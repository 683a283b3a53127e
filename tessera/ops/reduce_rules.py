"""Derivatives and batching of reductions."""

from __future__ import annotations

from tessera.op import batch, jvp, transpose
from tessera.ops.basic import broadcast_to, cast
from tessera.ops.derivatives import linear, still
from tessera.ops.reduce import argmax, argmin, max, mean, min, reduced, sum, var
from tessera.ops.shape import reshape
from tessera.tensor import Tensor, bind
from tessera.types import TensorType

jvp(sum)(linear(sum))
jvp(argmax, argmin)(still)


def _spread(g: Tensor, like: TensorType, axis: tuple[int, ...]) -> Tensor:
    """What a reduction over `axis` left, repeated along it again."""
    return broadcast_to(reshape(g, shape=reduced(like, axis, True)), shape=like.shape)


@jvp(max, min)
def _(out, primals, tangents, *, axis, keepdims):
    # Equal extremes share evenly (design 4).
    (x,), (t,) = primals, tangents
    reached = cast(x == _spread(out, x.type, axis), dtype=x.dtype)
    share = sum(t * reached, axis=axis, keepdims=keepdims)
    return share / sum(reached, axis=axis, keepdims=keepdims)


@transpose(sum)
def _(g, x, *, axis, keepdims):
    return (_spread(g, x, axis),)


@batch(sum, max, min, argmax, argmin, mean, var)
def _(lanes, **attrs):
    # Axes count from the end, so that a leading one changes nothing.
    return bind(lanes.op, lanes.tensors, attrs)
