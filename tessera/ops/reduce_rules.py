"""Derivatives and batching of reductions, products and the composites of neural networks."""

from __future__ import annotations

from tessera.op import batch, jvp, transpose
from tessera.ops import linalg, nn, reduce
from tessera.ops.basic import broadcast_to, cast
from tessera.ops.derivatives import along, linear, still, unknown
from tessera.ops.elementwise import exp
from tessera.ops.linalg import dot
from tessera.ops.reduce import reduced, sum
from tessera.ops.shape import reshape
from tessera.ops.shape import transpose as swap
from tessera.tensor import Tensor, bind
from tessera.types import TensorType

jvp(sum)(linear(sum))
jvp(reduce.argmax, reduce.argmin)(still)


def _spread(g: Tensor, like: TensorType, axis: tuple[int, ...]) -> Tensor:
    """What a reduction over `axis` left, repeated along it again."""
    return broadcast_to(reshape(g, shape=reduced(like, axis, True)), shape=like.shape)


@jvp(reduce.max, reduce.min)
def _(out, primals, tangents, *, axis, keepdims):
    # Equal extremes share evenly (design 4).
    (x,), (t,) = primals, tangents
    reached = cast(x == _spread(out, x.type, axis), dtype=x.dtype)
    share = sum(t * reached, axis=axis, keepdims=keepdims)
    return share / sum(reached, axis=axis, keepdims=keepdims)


@transpose(sum)
def _(g, x, *, axis, keepdims):
    return (_spread(g, x, axis),)


jvp(dot)(
    along(
        lambda t, out, a, b, dtype: dot(t, b, dtype=dtype),
        lambda t, out, a, b, dtype: dot(a, t, dtype=dtype),
    )
)


@transpose(dot)
def _(g, a, b, *, dtype):
    if unknown(a):
        g = g if g.dtype == b.dtype else cast(g, dtype=b.dtype)
        return dot(g, swap(b), dtype=a.dtype), None
    g = g if g.dtype == a.dtype else cast(g, dtype=a.dtype)
    return None, dot(swap(a), g, dtype=b.dtype)


# By its own value, which is 0 or 1 far out, where the formula's parts overflow.
jvp(nn.sigmoid)(along(lambda t, out, x: t * (out * (1.0 - out))))


@jvp(nn.softmax)
def _(out, primals, tangents, *, axis):
    # The distance to the maximum, which only keeps exp in range, takes no part.
    moved = tangents[0] * out
    return moved - out * sum(moved, axis=axis, keepdims=True)


@jvp(nn.log_softmax)
def _(out, primals, tangents, *, axis):
    return tangents[0] - sum(exp(out) * tangents[0], axis=axis, keepdims=True)


@batch(
    sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin, reduce.mean, reduce.var,
    nn.relu, nn.sigmoid, nn.silu, nn.gelu, nn.softmax, nn.log_softmax, nn.normalize,
)  # fmt: skip
def _(lanes, **attrs):
    # Axes count from the end, so that a leading one changes nothing.
    return bind(lanes.op, lanes.tensors, attrs)


@batch(nn.scaled_dot_product_attention)
def _(lanes, **attrs):
    return bind(lanes.op, lanes.spread(), attrs)


@batch(linalg.dot)
def _(lanes, *, dtype):
    a, b = lanes.tensors
    if lanes.batched[1] or b.ndim > 2:
        return dot(*lanes.spread(), dtype=dtype)
    # One product with all lanes' rows together.
    rows = reshape(a, shape=(lanes.size * a.shape[1], a.shape[2]))
    return reshape(dot(rows, b, dtype=dtype), shape=(lanes.size, a.shape[1], b.shape[1]))
