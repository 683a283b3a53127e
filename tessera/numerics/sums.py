"""Error rules of the ops that sum or search along an axis: sum, dot, argmax, argmin."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.numerics.bounded import Bounded, ends, settled
from tessera.numerics.formats import gamma
from tessera.numerics.site import HALF_ULP, Site, magnitude
from tessera.types import tf32


def _relative(site: Site, count: int) -> float:
    """The relative error of `count` roundings in the accumulator, and those of the f64 reference."""
    unit = site.compute.unit
    if site.types[0].dtype.bits <= 16 or site.types[0].dtype is tf32:
        unit *= 2  # matrix units add in the accumulator's width but cut off instead of rounding
    return gamma(count, unit) + gamma(count, HALF_ULP)


def total(site: Site, x: Bounded, *, axis: tuple[int, ...], keepdims: bool) -> Bounded:
    """For sum: γ(n−1)·Σ|x|, in any order, and the operands' radii."""
    value = np.asarray(site.reference(x, axis=axis, keepdims=keepdims))
    radius = np.sum(x.radius, axis=axis, keepdims=keepdims)
    if value.dtype.kind != "f":
        return settled(value, radius)
    count = int(np.prod([x.shape[a] for a in axis], dtype=np.int64))
    size = np.sum(magnitude(x.value) + x.radius, axis=axis, keepdims=keepdims)
    return _accumulated(site, value, radius, size, max(count - 1, 0), 0)


def _accumulated(site: Site, value: Any, radius: Any, size: Any, count: int, products: int) -> Bounded:
    """A sum whose terms' sizes add up to `size`, after `count` roundings each; then the store's."""
    tiny = np.where(size > 0, products * site.compute.tiny, 0.0)
    relative = _relative(site, count) if count else 0.0
    wide = radius + np.where(size > 0, relative * size, 0.0) + tiny
    # Some order of the sum may overflow on its way although the sum itself does not.
    wide = np.where((size * (1 + relative) > site.compute.top) & ~np.isnan(value), np.inf, wide)
    return site.stored(value, wide)


def product(site: Site, a: Bounded, b: Bounded, *, dtype: Any) -> Bounded:
    """For dot: γ(n)·|A||B| + |ΔA||B| + |A||ΔB| + |ΔA||ΔB|."""
    value = site.reference(a, b)
    if value.dtype.kind != "f" and a.exact and b.exact:
        return Bounded(value)
    left, right = (magnitude(x.value) + x.radius for x in (a, b))  # |A| and |B| of any legal operands
    size = _matmul(left, right)
    radius = np.zeros(value.shape)
    if not a.exact:
        radius = radius + _matmul(a.radius, right)
    if not b.exact:
        radius = radius + _matmul(magnitude(a.value), b.radius)
    radius = np.where(_infinite_times_uncertain(a, b) + _infinite_times_uncertain(b, a, swap=True), np.inf, radius)
    if value.dtype.kind != "f":
        return settled(value, radius)
    return _accumulated(site, value, radius, size, a.shape[-1], a.shape[-1])


def _matmul(left: Any, right: Any) -> Any:
    out = np.matmul(left, right)
    return np.where(np.isnan(out), np.inf, out)


def _infinite_times_uncertain(x: Bounded, y: Bounded, swap: bool = False) -> Any:
    """Where an infinity meets a factor whose sign is not certain."""
    infinite = ~np.isfinite(x.value)
    if not infinite.any() or y.exact:
        return np.False_
    pair = (infinite.astype(np.float64), (np.abs(y.value) <= y.radius).astype(np.float64) * (y.radius > 0))
    return np.matmul(*(reversed(pair) if swap else pair)) > 0


def _key(x: Any) -> Any:
    """What argmax goes by: NaN wins."""
    return np.where(np.isnan(x), np.inf, x)


def contest(sign: float) -> Any:
    """For argmax (`sign` 1) and argmin (−1): how far away in index another element may win."""

    def rule(site: Site, x: Bounded, *, axis: int, keepdims: bool) -> Bounded:
        value = np.asarray(site.reference(x, axis=axis, keepdims=keepdims))
        if x.exact:
            return Bounded(value)
        won = value if keepdims else np.expand_dims(value, axis)
        low, high = (_key(sign * end) for end in ends(x)[:: int(sign)])
        key, least = _key(sign * x.value.astype(np.float64)), low.max(axis=axis, keepdims=True)
        place = np.arange(x.shape[axis]).reshape([-1] + [1] * (-axis - 1))
        # Equals that are certain are no contest: the first one wins.
        tied = (key == np.take_along_axis(key, won, axis)) & (x.radius == 0)
        tied &= np.take_along_axis(x.radius, won, axis) == 0
        away = np.where((high >= least) & ~tied, np.abs(place - won), 0).max(axis=axis, keepdims=keepdims)
        return settled(value, away.astype(np.float64))

    return rule
