"""Derivatives and batching of the composites of neural networks."""

from __future__ import annotations

from tessera.op import batch, jvp
from tessera.ops.derivatives import along
from tessera.ops.elementwise import exp
from tessera.ops.nn import (
    gelu,
    log_softmax,
    normalize,
    relu,
    scaled_dot_product_attention,
    sigmoid,
    silu,
    softmax,
)  # fmt: skip
from tessera.ops.reduce import sum
from tessera.tensor import bind

# By its own value, which is 0 or 1 far out, where the formula's parts overflow.
jvp(sigmoid)(along(lambda t, out, x: t * (out * (1.0 - out))))


@jvp(softmax)
def _(out, primals, tangents, *, axis):
    # The distance to the maximum, which only keeps exp in range, takes no part.
    moved = tangents[0] * out
    return moved - out * sum(moved, axis=axis, keepdims=True)


@jvp(log_softmax)
def _(out, primals, tangents, *, axis):
    return tangents[0] - sum(exp(out) * tangents[0], axis=axis, keepdims=True)


@batch(relu, sigmoid, silu, gelu, softmax, log_softmax, normalize)
def _(lanes, **attrs):
    # Axes count from the end, so that a leading one changes nothing.
    return bind(lanes.op, lanes.tensors, attrs)


@batch(scaled_dot_product_attention)
def _(lanes, **attrs):
    return bind(lanes.op, lanes.spread(), attrs)
