"""Error rules that many ops share; `numerics/site.py` says what a rule is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tessera.numerics.bounded import Bounded, choose, distance, ends, lift, settled
from tessera.numerics.convert import convert
from tessera.numerics.site import Site
from tessera.types import DType, Policy, as_dtype

TINY = 2.0**-126  # the least normal f32


def structural(site: Site, *operands: Bounded, **attrs: Any) -> Bounded:
    """For ops that only move elements: radii move as values do."""
    return Bounded(site.reference(*operands, **attrs), site.op.ref(*(b.radius for b in operands), **attrs))


def constant(site: Site, **attrs: Any) -> Bounded:
    """For ops that make exact values from attributes alone."""
    return lift(site.op.ref(**attrs))


def _spread(site: Site, value: Any, operands: tuple[Bounded, ...], attrs: dict[str, Any]) -> Any:
    """How far the op's values at the corners of the operands' intervals lie from the reference."""
    radius = np.zeros(np.shape(value))
    sides = [ends(b) for b in operands]
    if all(len(s) == 1 for s in sides):
        return radius
    for corner in itertools.product(*sides):
        radius = np.maximum(radius, distance(site.op.ref(*corner, **attrs), value))
    if site.op.pointwise:  # a NaN may hide where nothing is known
        for operand in operands:
            radius = np.where(np.isinf(operand.radius), np.inf, radius)
    return radius


def selection(site: Site, *operands: Bounded, **attrs: Any) -> Bounded:
    """For ops monotone in each operand that never round: max, floor, neg, less, ...

    Their extremes over a box of operands lie at its corners.
    """
    value = site.reference(*operands, **attrs)
    return settled(value, _spread(site, value, operands, attrs))


def monotone(site: Site, *operands: Bounded, **attrs: Any) -> Bounded:
    """For ops monotone in each operand (for fixed others): as `selection`, then the op's own rounding."""
    value = site.reference(*operands, **attrs)
    return site.computed(value, _spread(site, value, operands, attrs))


def lipschitz(site: Site, x: Bounded) -> Bounded:
    """For sin and cos: an operand's error arrives at most undiminished, and both stay within [-1, 1]."""
    value = site.reference(x)
    return site.computed(value, np.where(np.isinf(x.radius), np.inf, np.minimum(x.radius, 1 + np.abs(value))))


def _straddles(x: Bounded) -> Any:
    """Where an interval holds zero and more."""
    return (x.radius > 0) & (np.abs(x.value) <= x.radius)


def quotient(site: Site, x: Bounded, y: Bounded) -> Bounded:
    """For division: monotone on either side of zero, and nothing is known across it."""
    value = site.reference(x, y)
    return site.computed(value, np.where(_straddles(y), np.inf, _spread(site, value, (x, y), {})))


def power(site: Site, x: Bounded, y: Bounded) -> Bounded:
    """For x to the power y: monotone but where x may be negative and y uncertain, or x zero and y negative."""
    value = site.reference(x, y)
    low, down = ends(x)[0], ends(y)[0]
    unknown = (np.signbit(low) & (y.radius > 0)) | (_straddles(x) & (down < 0))
    # NaN to the power 0 and 1 to the power NaN are 1.
    unknown |= np.isnan(x.value) & _straddles(y) | np.isnan(y.value) & _straddles(Bounded(x.value - 1, x.radius))
    return site.computed(value, np.where(unknown, np.inf, _spread(site, value, (x, y), {})))


def _floors(site: Site, x: Bounded, y: Bounded) -> tuple[Any, Any]:
    """The quotient rounded down, and how far off it may be: a target divides, correctly rounded, first."""
    value = np.floor_divide(x.value, y.value)
    if value.dtype.kind != "f":
        unsure = (x.radius > 0) | (y.radius > 0)
        return value, np.where(unsure, np.inf, np.zeros(value.shape))
    radius = np.zeros(value.shape)
    for a, b in itertools.product(ends(x), ends(y)):
        q = a / b
        off = np.where(np.isfinite(q), 2 * site.compute.rounding(np.abs(q)), 0.0)
        radius = np.maximum(radius, np.maximum(distance(np.floor(q + off), value), distance(np.floor(q - off), value)))
    whole = (x.radius == 0) & (y.radius == 0) & (np.fmod(x.value, y.value) == 0)
    unknown = _straddles(y) | (_straddles(x) & ~np.isfinite(y.value))  # less than 0 over inf is −1
    return value, np.where(unknown, np.inf, np.where(whole, 0.0, radius))


def floored(site: Site, x: Bounded, y: Bounded) -> Bounded:
    """For floor_divide: whole quotients, uncertain where the true one is close to a whole number."""
    value, radius = _floors(site, x, y)
    return site.computed(value, radius, 0.5)


def rest(site: Site, x: Bounded, y: Bounded) -> Bounded:
    """For remainder: x − y·floor(x/y), which may round y·floor(x/y) and wrap where the floor is uncertain."""
    value = site.reference(x, y)
    whole, off = _floors(site, x, y)
    if value.dtype.kind != "f":
        return settled(value, off)
    size = np.abs(whole) + off
    radius = x.radius + size * y.radius + np.where(off > 0, off * np.abs(y.value), 0.0)
    product = size * (np.abs(y.value) + y.radius)
    rounding = site.compute.rounding(np.where(np.isfinite(product), product, 0.0))
    return site.computed(value, radius + np.where(np.isfinite(value) & (whole != 0), rounding, 0.0), 0.5)


def equality(site: Site, x: Bounded, y: Bounded) -> Bounded:
    """For == and !=: uncertain where the intervals meet, but for two points."""
    reach = x.radius + y.radius
    return settled(site.reference(x, y), np.where((reach > 0) & (distance(x.value, y.value) <= reach), 1.0, 0.0))


def bits(site: Site, *operands: Bounded) -> Bounded:
    """For bitwise ops: every combination of uncertain bools; nothing is known of uncertain integers."""
    value = site.reference(*operands)
    if value.dtype.kind == "b":
        return settled(value, _spread(site, value, operands, {}))
    radius = np.zeros(value.shape)
    for operand in operands:
        radius = np.where(operand.radius > 0, np.inf, radius)
    return settled(value, radius)


def selected(site: Site, condition: Bounded, x: Bounded, y: Bounded) -> Bounded:
    """For where: the branch taken; both, where the condition is uncertain."""
    return choose(condition, x, y)


def converted(site: Site, x: Bounded, *, dtype: DType | Policy) -> Bounded:
    """For cast: one rounding to a float; integers and bools from whichever values the interval holds."""
    dtype = as_dtype(dtype)
    if dtype.is_float:
        wide = Bounded(x.value.astype(np.float64), x.radius)
        # int64 to f64 is the one rounding that the reference makes itself.
        slack = np.where(np.abs(wide.value) >= 2.0**53, np.abs(wide.value) * 2.0**-53, 0.0) * (x.dtype.kind == "i")
        return site.stored(wide.value, wide.radius + slack)
    value = convert(x.value, dtype)
    radius = np.where(np.isinf(x.radius), np.inf, 0.0)
    for end in ends(x):
        near = convert(end, dtype)
        wraps = (x.dtype.kind in "iu") & (x.radius > 0) & (near != end)
        radius = np.maximum(radius, np.where(wraps, np.inf, distance(near, value)))
    return settled(value, radius)


def roughly_converted(site: Site, x: Bounded, *, dtype: DType) -> Bounded:
    """For a cast that may lose what lies below the least normal f32."""
    found = converted(site, x, dtype=dtype)
    low = np.abs(found.value) - found.radius < TINY
    return settled(found.value, found.radius + np.where(low, TINY, 0.0))


def _rounded(number: Any, dtype: DType) -> tuple[Any, Any]:
    """A constant and how far its stored form lies from it: a target may hold either."""
    stored = Bounded(convert(np.asarray(number), dtype)).value
    if not dtype.is_float or not np.isfinite(stored):
        return stored, np.zeros(())
    return np.float64(number), distance(stored, number)


def filled(site: Site, *, shape: tuple, value: Any, dtype: DType) -> Bounded:
    """For full: the constant as written, with its rounding as radius."""
    number, radius = _rounded(value, dtype)
    return Bounded(np.full(shape, number), np.full(shape, radius))


def padded(site: Site, x: Bounded, *, low: tuple, high: tuple, value: Any) -> Bounded:
    """For pad: the elements, and round them the constant with its rounding."""
    widths = list(zip(low, high, strict=True))
    number, radius = _rounded(value, site.types[0].dtype)
    return Bounded(
        np.pad(x.value, widths, constant_values=np.asarray(number).astype(x.dtype)),
        np.pad(x.radius, widths, constant_values=radius),
    )


def gathered(site: Site, x: Bounded, indices: Bounded, *, axis: int) -> Bounded:
    """For gather: the slices named; nothing is known of one whose index may be another."""
    radius = np.take(x.radius, indices.value, axis=axis)
    unsure = (indices.radius > 0).reshape(indices.shape + (1,) * (-axis - 1))
    return Bounded(site.reference(x, indices, axis=axis), np.where(unsure, np.inf, radius))
