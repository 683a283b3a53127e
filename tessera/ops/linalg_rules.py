"""Derivatives and batching of `dot`."""

from __future__ import annotations

from tessera.op import batch, jvp, transpose
from tessera.ops.basic import cast
from tessera.ops.derivatives import along, unknown
from tessera.ops.linalg import dot
from tessera.ops.shape import reshape
from tessera.ops.shape import transpose as swap

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


@batch(dot)
def _(lanes, *, dtype):
    a, b = lanes.tensors
    if lanes.batched[1] or b.ndim > 2:
        return dot(*lanes.spread(), dtype=dtype)
    # One product with all lanes' rows together.
    rows = reshape(a, shape=(lanes.size * a.shape[1], a.shape[2]))
    return reshape(dot(rows, b, dtype=dtype), shape=(lanes.size, a.shape[1], b.shape[1]))
