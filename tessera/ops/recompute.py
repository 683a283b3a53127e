"""The marks of checkpoints: what is kept, and where a computation begins again."""

from __future__ import annotations

from tessera.numerics import bounds
from tessera.op import STORAGE, batch, error, jvp, lower, op, transpose
from tessera.ops.basic import plain
from tessera.ops.derivatives import linear
from tessera.tensor import bind


@op(infer=lambda x: x, coerce=plain, numerics=STORAGE)
def recompute(x):
    """`x`; what is computed from it is computed again, whatever else computes the same from `x`."""
    return x


error(recompute)(bounds.structural)
jvp(recompute)(linear(recompute))


@op(infer=lambda x: x, coerce=plain, numerics=STORAGE)
def kept(x):
    """`x`, which a checkpoint around it keeps for the way back."""
    return x


@lower(kept)
def _(x):
    return x


jvp(kept)(linear(kept))


@transpose(recompute, kept)
def _(g, x):
    return (g,)


@batch(recompute, kept)
def _(lanes):
    return bind(lanes.op, lanes.tensors, {})
