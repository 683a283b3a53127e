"""Stochastic rounding in two explicit steps, which every level below Graph has in place of a policy's clause."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tessera.numerics.bounded import Bounded
from tessera.numerics.rounding import draws, round_to
from tessera.numerics.site import Site
from tessera.op import STORAGE, error, op
from tessera.ops.basic import full, plain
from tessera.ops.shape import iota
from tessera.tensor import Tensor
from tessera.types import Policy, TensorType, int64


def certain(policy: Policy | None) -> Policy | None:
    """A policy without its stochastic clause: that of numbers which are rounded already."""
    return policy if policy is None else replace(policy, rounding="nearest", seed=0)


def _rounded_type(x: TensorType, draw: TensorType, *, dtype: Policy) -> TensorType:
    return TensorType(x.shape, dtype.storage, certain(dtype))


@op(infer=_rounded_type, coerce=plain, numerics=STORAGE, pointwise=True)
def round_by_chance(x: Any, draw: Any, *, dtype: Policy) -> Any:
    """`x`, of type f64, rounded to a policy's storage: up if `draw`, 53 random bits, is below the distance from below.

    The distance counts in steps of 2^-53 of that between the two neighbours.
    """
    return round_to(x, dtype.storage, "stochastic", dtype.saturate, dtype.denormals == "flush", draw=draw)


@error(round_by_chance)
def _(site: Site, x: Bounded, draw: Bounded, *, dtype: Policy) -> Bounded:
    result = replace(site.results[0], policy=dtype)
    return replace(site, results=(result,)).stored(x.value, x.radius)


def draws_for(shape: tuple[int, ...], seed: int, first: Any = 0) -> Tensor:
    """The 53 random bits of each place of a tensor, as the interpreter draws them when it stores a result.

    `first` is the number of its first place, where it is a part of something larger.
    """
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    place = full(shape=shape, value=0, dtype=int64)
    for axis, step in enumerate(steps):
        place = place + iota(shape=shape, axis=axis) * step
    if not isinstance(first, int) or first:
        place = place + first
    return draws(place, seed)
