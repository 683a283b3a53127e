"""Stochastic rounding: an op that rounds by a random draw, and the draws, in place of a policy clause below Graph."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tessera.core.types import Policy, TensorType, int64
from tessera.ir.numerics.conversion import draw_random_bits, round_to_format
from tessera.ir.numerics.error_model import ErrorSite
from tessera.ir.numerics.interval_arithmetic import IntervalArray
from tessera.ir.rules import STORAGE, error, op
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import coerce_plain, full
from tessera.ops.tensor.shape import iota


def drop_stochastic_clause(policy: Policy | None) -> Policy | None:
    """A policy without its stochastic clause, for values that are already rounded."""
    return policy if policy is None else replace(policy, rounding="nearest", seed=0)


def _infer_rounded(x: TensorType, draw: TensorType, *, dtype: Policy) -> TensorType:
    return TensorType(x.shape, dtype.storage, drop_stochastic_clause(dtype))


@op(infer=_infer_rounded, coerce=coerce_plain, numerics=STORAGE, pointwise=True)
def round_by_chance(x: Any, draw: Any, *, dtype: Policy) -> Any:
    """`x`, of type f64, rounded to a policy's storage: up if `draw`, 53 random bits, is below the distance from below.

    The distance counts in steps of 2^-53 of that between the two neighbours.
    """
    return round_to_format(x, dtype.storage, "stochastic", dtype.saturate, dtype.denormals == "flush", draw=draw)


@error(round_by_chance)
def _(site: ErrorSite, x: IntervalArray, draw: IntervalArray, *, dtype: Policy) -> IntervalArray:
    result = replace(site.results[0], policy=dtype)
    return replace(site, results=(result,)).stored(x.value, x.radius)


def draw_rounding_bits(shape: tuple[int, ...], seed: int, first: Any = 0) -> Tensor:
    """The 53 random bits of each element of a tensor: the same as those of the interpreter's rounding.

    `first` is the index of the first element, where the tensor is a part of a larger one.
    """
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    place = full(shape=shape, value=0, dtype=int64)
    for axis, step in enumerate(steps):
        place = place + iota(shape=shape, axis=axis) * step
    if not isinstance(first, int) or first:
        place = place + first
    return draw_random_bits(place, seed)
