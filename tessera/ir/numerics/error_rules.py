"""Error rules: forward error bounds (Higham 2002) that ops share, from interval operands to an interval result."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np

from tessera.core.types import DType, Policy, as_dtype, bool_, f64, tf32
from tessera.ir.numerics.conversion import convert
from tessera.ir.numerics.error_model import F64_HALF_ULP, ErrorSite, finite_magnitude, gamma
from tessera.ir.numerics.interval_arithmetic import (
    IntervalArray,
    absolute_distance,
    interval_ends,
    make_interval,
    select_interval,
    to_interval,
)

# Error rules that many ops share: rule(site, *operands, **attrs) gives an interval (see `ErrorSite`).


F32_MIN_NORMAL = 2.0**-126  # the least normal f32


def bound_structural(site: ErrorSite, *operands: IntervalArray, **attrs: Any) -> IntervalArray:
    """For ops that only move elements: radii move with the values."""
    return IntervalArray(site.reference(*operands, **attrs), site.op.ref(*(b.radius for b in operands), **attrs))


def bound_constant(site: ErrorSite, **attrs: Any) -> IntervalArray:
    """For ops that make exact values from attributes alone."""
    return to_interval(site.op.ref(**attrs))


def _corner_spread(site: ErrorSite, value: Any, operands: tuple[IntervalArray, ...], attrs: dict[str, Any]) -> Any:
    """The largest distance from the reference of the op's values at the corners of the operands' intervals.

    The ends of intervals of integers are f64: a value there that the type of the result lacks wraps, to anything.
    """
    radius = np.zeros(np.shape(value))
    sides = [_clip_ends(b) for b in operands]
    if all(len(s) == 1 for s in sides):
        return radius
    low, high = _find_integer_range(np.asarray(value).dtype)
    for corner in itertools.product(*sides):
        found = site.op.ref(*corner, **attrs)
        wraps = (found <= low - 1) | (found >= high + 1) if low < high else False
        radius = np.maximum(radius, np.where(wraps, np.inf, absolute_distance(found, value)))
    if site.op.pointwise:  # a NaN may hide where nothing is known
        for operand in operands:
            radius = np.where(np.isinf(operand.radius), np.inf, radius)
    return radius


def _find_integer_range(dtype: np.dtype) -> tuple[float, float]:
    """The least and the greatest integer of a type, as f64; (0, 0) for any other type."""
    found = as_dtype(dtype)
    if found.kind not in ("int", "uint"):
        return 0.0, 0.0
    signed = found.kind == "int"
    return (-(2.0 ** (found.bits - 1)), 2.0 ** (found.bits - 1) - 1) if signed else (0.0, 2.0**found.bits - 1)


def _clip_ends(x: IntervalArray) -> tuple[Any, ...]:
    """The ends of an interval; those of integers are whole, and lie within their type."""
    ends, (least, greatest) = interval_ends(x), _find_integer_range(x.dtype)
    if len(ends) == 1 or least == greatest:
        return ends
    return np.maximum(np.ceil(ends[0]), least), np.minimum(np.floor(ends[1]), greatest)


def bound_selection(site: ErrorSite, *operands: IntervalArray, **attrs: Any) -> IntervalArray:
    """For ops monotone in each operand that never round: max, floor, neg, less, ...

    Their extremes over a box of operands lie at its corners.
    """
    value = site.reference(*operands, **attrs)
    spread, policy = _corner_spread(site, value, operands, attrs), site.results[0].policy
    # A narrow compute type made an infinity, or an operand was not flushed: the result is stored as another number.
    if policy is not None and (policy.saturate or policy.denormals == "flush"):
        return site.stored(value, spread)
    return make_interval(value, spread)


def bound_whole_numbers(site: ErrorSite, x: IntervalArray) -> IntervalArray:
    """For floor, ceil and round: as `selection`, then stored.

    A narrow format lacks whole numbers that the compute type has: e5m2 has no 9, and fp6_e2m3 ends at 7.5.
    """
    found = bound_selection(site, x)
    return found if site.storage.dtype == site.compute.dtype else site.stored(found.value, found.radius)


def bound_monotone(site: ErrorSite, *operands: IntervalArray, **attrs: Any) -> IntervalArray:
    """For ops monotone in each operand (for fixed others): as `selection`, then the op's own rounding."""
    value = np.asarray(site.reference(*operands, **attrs))
    exact = _find_exact(site, operands, value)
    return site.computed(value, _corner_spread(site, value, operands, attrs), exact=exact)


def _find_exact(site: ErrorSite, operands: tuple[IntervalArray, ...], value: np.ndarray) -> Any:
    """Where an operation on f64 has no rounding error; elsewhere the result is compared with the format's numbers."""
    test = EXACT_IN_F64.get(site.op.__name__)
    if test is None or site.compute.dtype is not f64 or value.dtype.kind != "f":
        return False
    return test(*(b.value.astype(np.float64) for b in operands), value)


def _has_exact_sum(x: np.ndarray, y: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Where x + y is `total` without an error (two-sum, Knuth 1969)."""
    z = total - x
    return np.isfinite(total) & ((x - (total - z)) + (y - z) == 0)


def _has_exact_product(x: np.ndarray, y: np.ndarray, product: np.ndarray) -> np.ndarray:
    """Where x · y is `product` without an error: of zeros, powers of two and small whole numbers."""
    power = (np.abs(np.frexp(x)[0]) == 0.5) | (np.abs(np.frexp(y)[0]) == 0.5)
    whole = (x == np.rint(x)) & (y == np.rint(y)) & (np.abs(product) < 2.0**53)
    normal = np.isfinite(product) & (np.abs(product) >= F64_MIN_NORMAL)
    return (np.isfinite(x) & np.isfinite(y) & ((x == 0) | (y == 0))) | (normal & (power | whole))


F64_MIN_NORMAL = 2.0**-1022
EXACT_IN_F64: dict[str, Any] = {
    "add": _has_exact_sum,
    "sub": lambda x, y, value: _has_exact_sum(x, -y, value),
    "mul": _has_exact_product,
    "div": lambda x, y, value: (y != 0) & (value * y == x) & _has_exact_product(value, y, x),
    "sqrt": lambda x, value: (value * value == x) & _has_exact_product(value, value, x),
}


def bound_additive(site: ErrorSite, x: IntervalArray, y: IntervalArray) -> IntervalArray:
    """For x + y and x − y: the radii add up, then the op's own rounding; corners for integers, which may wrap."""
    value = site.reference(x, y)
    if value.dtype.kind != "f":
        return site.computed(value, _corner_spread(site, value, (x, y), {}))
    radius = np.broadcast_to(x.radius + y.radius, value.shape)
    return site.computed(value, radius, exact=_find_exact(site, (x, y), value))


def bound_lipschitz(site: ErrorSite, x: IntervalArray) -> IntervalArray:
    """For sin and cos: an operand's error arrives at most undiminished, and both stay within [-1, 1]."""
    value = site.reference(x)
    limited = np.where(np.isnan(value), x.radius, np.minimum(x.radius, 1 + np.abs(value)))  # of infinities: NaN
    return site.computed(value, np.where(np.isinf(x.radius), np.inf, limited))


def _contains_zero(x: IntervalArray) -> Any:
    """Where an interval holds zero and more."""
    return (x.radius > 0) & (np.abs(x.value) <= x.radius)


def bound_quotient(site: ErrorSite, x: IntervalArray, y: IntervalArray) -> IntervalArray:
    """For division: monotone on either side of zero, and nothing is known across it."""
    value = np.asarray(site.reference(x, y))
    radius = np.where(_contains_zero(y), np.inf, _corner_spread(site, value, (x, y), {}))
    return site.computed(value, radius, exact=_find_exact(site, (x, y), value))


def bound_power(site: ErrorSite, x: IntervalArray, y: IntervalArray) -> IntervalArray:
    """For x to the power y: monotone but where x may be negative and y uncertain, or x zero and y negative."""
    value = site.reference(x, y)
    low, down = interval_ends(x)[0], interval_ends(y)[0]
    unknown = (np.signbit(low) & (y.radius > 0)) | (_contains_zero(x) & (down < 0))
    # NaN to the power 0 and 1 to the power NaN are 1.
    unknown |= np.isnan(x.value) & _contains_zero(y) | np.isnan(y.value) & _contains_zero(
        IntervalArray(x.value - 1, x.radius)
    )
    return site.computed(value, np.where(unknown, np.inf, _corner_spread(site, value, (x, y), {})))


def _bound_floor(site: ErrorSite, x: IntervalArray, y: IntervalArray) -> tuple[Any, Any]:
    """The quotient rounded down, and how far off it may be: a target divides, correctly rounded, first."""
    value = np.floor_divide(x.value, y.value)
    if value.dtype.kind != "f":
        unsure = (x.radius > 0) | (y.radius > 0)
        return value, np.where(unsure, np.inf, np.zeros(value.shape))
    radius = np.zeros(value.shape)
    for a, b in itertools.product(interval_ends(x), interval_ends(y)):
        q = a / b
        off = np.where(np.isfinite(q), 2 * site.compute.rounding(np.abs(q)), 0.0)
        # A rounding does not change the sign; what vanishes may become a zero of either.
        low = np.where(np.signbit(a) == np.signbit(b), np.maximum(q - off, 0.0), q - off)
        high = np.where(q < -2 * site.compute.tiny, np.minimum(q + off, -site.compute.tiny), q + off)
        for end in (low, high):
            radius = np.maximum(radius, absolute_distance(np.floor(end), value))
    whole = (x.radius == 0) & (y.radius == 0) & (np.fmod(x.value, y.value) == 0)
    unknown = _contains_zero(y) | (_contains_zero(x) & ~np.isfinite(y.value))  # less than 0 over inf is −1
    return value, np.where(unknown, np.inf, np.where(whole, 0.0, radius))


def bound_floor_divide(site: ErrorSite, x: IntervalArray, y: IntervalArray) -> IntervalArray:
    """For floor_divide: whole quotients, uncertain where the true one is close to a whole number."""
    value, radius = _bound_floor(site, x, y)
    return site.computed(value, radius, 0.5)


def bound_remainder(site: ErrorSite, x: IntervalArray, y: IntervalArray) -> IntervalArray:
    """For remainder: x − y·floor(x/y), which may round y·floor(x/y) and wrap where the floor is uncertain."""
    value = site.reference(x, y)
    whole, off = _bound_floor(site, x, y)
    if value.dtype.kind != "f":
        return make_interval(value, off)
    size = np.abs(whole) + off
    moved = np.where(y.radius > 0, size * y.radius, 0.0)
    radius = x.radius + moved + np.where(off > 0, off * np.abs(y.value), 0.0)
    product = size * (np.abs(y.value) + y.radius)
    beyond = np.isinf(whole) & np.isfinite(y.value)  # the quotient overflows, y times it is about x
    product = np.where(beyond, np.abs(x.value) + np.abs(y.value), product)
    rounding = site.compute.rounding(np.where(np.isfinite(product), product, 0.0))
    certain = (x.radius == 0) & (y.radius == 0)
    divides = certain & (value == 0) & (off == 0)  # the product is the dividend, which the format has
    radius = radius + np.where(np.isfinite(value) & (whole != 0) & ~divides, rounding, 0.0)
    radius = np.where(certain & np.isnan(value), 0.0, radius)  # by 0, of infinities: NaN on every way
    return site.computed(value, radius, 0.5, exact=divides)


def bound_equality(site: ErrorSite, x: IntervalArray, y: IntervalArray) -> IntervalArray:
    """For == and !=: uncertain where the intervals meet, but for two points."""
    reach = x.radius + y.radius
    return make_interval(
        site.reference(x, y), np.where((reach > 0) & (absolute_distance(x.value, y.value) <= reach), 1.0, 0.0)
    )


def bound_bitwise(site: ErrorSite, *operands: IntervalArray) -> IntervalArray:
    """For bitwise ops: every combination of uncertain bools; nothing is known of uncertain integers."""
    value = site.reference(*operands)
    if value.dtype.kind == "b":
        return make_interval(value, _corner_spread(site, value, operands, {}))
    radius = np.zeros(value.shape)
    for operand in operands:
        radius = np.where(operand.radius > 0, np.inf, radius)
    return make_interval(value, radius)


def bound_where(site: ErrorSite, condition: IntervalArray, x: IntervalArray, y: IntervalArray) -> IntervalArray:
    """For where: the branch taken; both, where the condition is uncertain."""
    return select_interval(condition, x, y)


def bound_cast(site: ErrorSite, x: IntervalArray, *, dtype: DType | Policy) -> IntervalArray:
    """For cast: one rounding to a float; integers and bools from whichever values the interval holds."""
    dtype = as_dtype(dtype)
    if dtype.is_float:
        wide = IntervalArray(x.value.astype(np.float64), x.radius)
        # int64 to f64 is the one rounding that the reference makes itself.
        rounds = (np.abs(wide.value) >= 2.0**53) & (x.dtype.kind in "iu")
        return site.stored(wide.value, wide.radius + np.where(rounds, np.abs(wide.value) * 2.0**-53, 0.0))
    value = convert(x.value, dtype)
    radius = np.where(np.isinf(x.radius), np.inf, 0.0)
    ends = _clip_ends(x)
    if dtype == bool_ and len(ends) > 1:  # 0 alone is false, also between two ends that are not
        ends = (*ends, np.clip(np.zeros_like(ends[0]), *ends))
    for end in ends:
        near = convert(end, dtype)
        wraps = (x.dtype.kind in "iu") & (x.radius > 0) & (near != end)
        radius = np.maximum(radius, np.where(wraps, np.inf, absolute_distance(near, value)))
    return make_interval(value, radius)


def bound_rough_cast(site: ErrorSite, x: IntervalArray, *, dtype: DType) -> IntervalArray:
    """For a cast that may lose what lies below the least normal f32."""
    found = bound_cast(site, x, dtype=dtype)
    low = np.abs(found.value) - found.radius < F32_MIN_NORMAL
    return make_interval(found.value, found.radius + np.where(low, F32_MIN_NORMAL, 0.0))


def _round_constant(number: Any, dtype: DType) -> tuple[Any, Any]:
    """A constant and how far its stored form lies from it: a target may hold either."""
    stored = IntervalArray(convert(np.asarray(number), dtype)).value
    if not dtype.is_float or not np.isfinite(stored):
        return stored, np.zeros(())
    return np.float64(number), absolute_distance(stored, number)


def bound_full(site: ErrorSite, *, shape: tuple, value: Any, dtype: DType) -> IntervalArray:
    """For full: the constant as written, with its rounding as radius."""
    number, radius = _round_constant(value, dtype)
    return IntervalArray(np.full(shape, number), np.full(shape, radius))


def bound_pad(site: ErrorSite, x: IntervalArray, *, low: tuple, high: tuple, value: Any) -> IntervalArray:
    """For pad: the elements, and round them the constant with its rounding."""
    widths = list(zip(low, high, strict=True))
    number, radius = _round_constant(value, site.types[0].dtype)
    return IntervalArray(
        np.pad(x.value, widths, constant_values=np.asarray(number).astype(x.dtype)),
        np.pad(x.radius, widths, constant_values=radius),
    )


def bound_index(site: ErrorSite, indices: IntervalArray, **attrs: Any) -> IntervalArray:
    """For check_index: exact; nothing is known of an index that may be another."""
    return make_interval(site.reference(indices, **attrs), np.where(indices.radius > 0, np.inf, 0.0))


def bound_gather(site: ErrorSite, x: IntervalArray, indices: IntervalArray, *, axis: int) -> IntervalArray:
    """For gather: the slices named; nothing is known of one whose index may be another."""
    radius = site.op.ref(x.radius, indices.value, axis=axis)
    unsure = (indices.radius > 0).reshape(indices.shape + (1,) * (-axis - 1))
    return IntervalArray(site.reference(x, indices, axis=axis), np.where(unsure, np.inf, radius))


# Error rules of the ops that sum or search along an axis: sum, dot, argmax, argmin.


def _relative_error(site: ErrorSite, count: int) -> float:
    """The relative error of `count` roundings in the accumulator, and those of the f64 reference."""
    unit = site.compute.unit
    if site.types[0].dtype.bits <= 16 or site.types[0].dtype is tf32:
        unit *= 2  # matrix units add in the accumulator's width but cut off instead of rounding
    return gamma(count, unit) + gamma(count, F64_HALF_ULP)


def bound_sum(site: ErrorSite, x: IntervalArray, *, axis: tuple[int, ...], keepdims: bool) -> IntervalArray:
    """For sum: γ(n−1)·Σ|x|, in any order, and the operands' radii."""
    value = np.asarray(site.reference(x, axis=axis, keepdims=keepdims))
    radius = np.sum(x.radius, axis=axis, keepdims=keepdims)
    if value.dtype.kind != "f":
        return make_interval(value, radius)
    count = int(np.prod([x.shape[a] for a in axis], dtype=np.int64))
    size = np.sum(finite_magnitude(x.value) + x.radius, axis=axis, keepdims=keepdims)
    exact = _find_exact_sums(site, size, x)
    return _bound_accumulation(site, value, radius, size, max(count - 1, 0), 0, exact)


def _find_exact_sums(site: ErrorSite, size: Any, *factors: IntervalArray) -> Any:
    """Where sums of products of exact factors have no rounding error in any order.

    All factors are multiples of powers of two, so partial sums are multiples of the product of these, and none is
    beyond the whole numbers that the accumulator has. Matrix units that add fp8 products keep fewer bits.
    """
    if not all(x.exact for x in factors) or any(t.dtype.bits <= 8 for t in site.types):
        return False
    quantum = math.prod(_find_quantum(x.value) for x in factors)
    return size <= quantum * (0.5 / site.compute.unit)


def _find_quantum(values: np.ndarray) -> float:
    """The largest power of two of which all numbers are multiples; 0 if that is tiny or a number is not finite."""
    for part in (values.ravel()[:64], values.ravel()):  # most arrays show it at once
        fraction, exponent = np.frexp(part[part != 0])
        if not np.isfinite(fraction).all():
            return 0.0
        whole = (np.abs(fraction) * 2.0**53).astype(np.int64)
        low = np.frexp((whole & -whole).astype(np.float64))[1] - 54 + exponent
        quantum = float(np.exp2(float(low.min(initial=900))))
        if quantum < LEAST_QUANTUM:
            return 0.0
    return quantum


LEAST_QUANTUM = 2.0**-40


def bound_cumulative_sum(site: ErrorSite, x: IntervalArray, *, axis: int) -> IntervalArray:
    """For cumsum: γ(n−1)·Σ|x|, in any order."""
    value = np.asarray(site.reference(x, axis=axis))
    radius = np.cumsum(x.radius, axis=axis)
    if value.dtype.kind != "f":
        return make_interval(value, radius)
    count = max(x.shape[axis] - 1, 0)
    size = np.cumsum(finite_magnitude(x.value) + x.radius, axis=axis)
    return _bound_accumulation(site, value, radius, size, count, 0, _find_exact_sums(site, size, x))


def _bound_accumulation(
    site: ErrorSite, value: Any, radius: Any, size: Any, count: Any, products: int, exact: Any = False
) -> IntervalArray:
    """A sum whose terms' sizes add up to `size`, after `count` roundings each, none where `exact`; then the store's."""
    tiny = np.where(size > 0, products * site.compute.tiny, 0.0)
    numbers, which = np.unique(count, return_inverse=True)
    relative = np.array([_relative_error(site, int(n)) if n else 0.0 for n in numbers])[which].reshape(np.shape(count))
    wide = radius + np.where(size > 0, relative * size, 0.0) + tiny
    # Some order of the sum may overflow on its way although the sum itself does not.
    wide = np.where((size * (1 + relative) > site.compute.top) & ~np.isnan(value), np.inf, wide)
    return site.stored(value, np.where(exact, radius, wide))


def bound_scatter_add(
    site: ErrorSite, x: IntervalArray, indices: IntervalArray, updates: IntervalArray, *, axis: int
) -> IntervalArray:
    """For scatter_add: each element and its updates in any order; an index that may be another changes every slice."""
    value = np.asarray(site.reference(x, indices, updates, axis=axis))
    magnitudes = [finite_magnitude(each.value) + each.radius for each in (x, updates)]
    unsure = (indices.radius > 0).reshape(indices.shape + (1,) * (-axis - 1))
    first = axis + updates.ndim - indices.ndim + 1

    def add_up(base: Any, changes: Any) -> Any:
        moved = np.sum(np.where(unsure, changes, 0.0), axis=tuple(range(first, first + indices.ndim)))
        return site.op.ref(base, indices.value, changes, axis=axis) + np.expand_dims(moved, axis)

    radius = add_up(x.radius, np.where(unsure, magnitudes[1], updates.radius))
    if value.dtype.kind != "f":
        return make_interval(value, radius)
    count, size = add_up(np.zeros(x.shape), np.ones(updates.shape)), add_up(*magnitudes)
    terms = IntervalArray(
        *(np.concatenate([np.ravel(getattr(e, n)) for e in (x, updates)]) for n in ("value", "radius"))
    )
    return _bound_accumulation(site, value, radius, size, count, 0, _find_exact_sums(site, size, terms))


def bound_product(site: ErrorSite, x: IntervalArray, *, axis: tuple[int, ...], keepdims: bool) -> IntervalArray:
    """For prod: the error of n factors in any order, whose partial products may overflow or vanish on the way."""
    count = int(np.prod([x.shape[a] for a in axis], dtype=np.int64))
    return _bound_factors(site, x, {"axis": axis, "keepdims": keepdims}, np.multiply.reduce, np.add.reduce, count)


def bound_cumulative_product(site: ErrorSite, x: IntervalArray, *, axis: int) -> IntervalArray:
    """For cumprod: as for prod, for each of the products."""
    return _bound_factors(site, x, {"axis": axis}, np.multiply.accumulate, np.add.accumulate, x.shape[axis])


def _bound_factors(
    site: ErrorSite, x: IntervalArray, attrs: dict[str, Any], multiply: Any, total: Any, count: int
) -> IntervalArray:
    """Products of `count` factors: Π(|x| + |Δx|)·(1 + γ(n−1)) − Π|x|, and the roundings of subnormal partial products.

    Any subset of the factors may be a partial product: the largest is that of the factors above 1, the least that of
    those below 1. Their logarithms are compared with the limits of the format, which they may exceed by far.
    """
    value = np.asarray(site.reference(x, **attrs))
    if value.dtype.kind != "f" or count < 2:
        return make_interval(value, total(x.radius, **attrs) if count < 2 else _bound_whole(x, total, attrs))
    known = np.isfinite(x.value)
    high = np.where(known, np.abs(x.value) + x.radius, 1.0)
    low = np.where(known, np.maximum(np.abs(x.value) - x.radius, 0.0), 1.0)
    slack = count * LOGARITHM_ERROR
    most, least = (total(np.log2(part), **attrs) for part in (np.maximum(high, 1.0), np.minimum(low, 1.0)))
    top, normal = np.log2(site.compute.top), np.log2(float(ml_dtypes.finfo(site.compute.dtype.numpy).smallest_normal))
    overflows, vanishes = ~(most <= top - slack), ~(least >= normal + slack)
    relative = gamma(count - 1, site.compute.unit) + 2 * gamma(count, F64_HALF_ULP)
    radius = multiply(high, **attrs) * (1 + relative) - finite_magnitude(value)
    radius = radius + np.where(vanishes, 2 * count * site.compute.tiny * np.exp2(most), 0.0)
    infinite, none = (total(part, **attrs) > 0 for part in (np.isinf(x.value), high == 0))
    nan = (total(np.isnan(x.value), **attrs) > 0) | (infinite & none)
    endless = ~nan & ~vanishes & (infinite | (total(np.log2(low), **attrs) > top + slack))
    unknown = ~nan & ~endless & (infinite | overflows)
    sign = multiply(np.where(np.signbit(x.value), -1.0, 1.0), **attrs)
    value = np.select([nan, endless], [np.nan, np.copysign(np.inf, sign)], np.where(np.isfinite(value), value, 0.0))
    return site.stored(value, np.select([nan | endless | (none & ~unknown), unknown], [0.0, np.inf], radius))


LOGARITHM_ERROR = 1e-9  # of a logarithm to base 2 of an f64, in a sum


def _bound_whole(x: IntervalArray, total: Any, attrs: dict[str, Any]) -> np.ndarray:
    """The radius of products of integers, which may wrap: nothing is known unless all are exact."""
    return np.where(total(x.radius > 0, **attrs) > 0, np.inf, 0.0)


def bound_dot(site: ErrorSite, a: IntervalArray, b: IntervalArray, *, dtype: Any) -> IntervalArray:
    """For dot: γ(n)·|A||B| + |ΔA||B| + |A||ΔB| + |ΔA||ΔB|."""
    value = site.reference(a, b)
    if value.dtype.kind != "f" and a.exact and b.exact:
        return IntervalArray(value)
    left, right = (finite_magnitude(x.value) + x.radius for x in (a, b))  # |A| and |B| of any legal operands
    size = _multiply_magnitudes(left, right)
    radius = np.zeros(value.shape)
    if not a.exact:
        radius = radius + _multiply_magnitudes(a.radius, right)
    if not b.exact:
        radius = radius + _multiply_magnitudes(finite_magnitude(a.value), b.radius)
    radius = np.where(_infinite_times_uncertain(a, b) + _infinite_times_uncertain(b, a, swap=True), np.inf, radius)
    if value.dtype.kind != "f":
        wraps = (radius > 0) & (size > _find_integer_range(value.dtype)[1])
        return make_interval(value, np.where(wraps, np.inf, radius))
    exact = _find_exact_sums(site, size, a, b)
    return _bound_accumulation(site, value, radius, size, a.shape[-1], a.shape[-1], exact)


def _multiply_magnitudes(left: Any, right: Any) -> Any:
    out = np.matmul(left, right)
    return np.where(np.isnan(out), np.inf, out)


def _infinite_times_uncertain(x: IntervalArray, y: IntervalArray, swap: bool = False) -> Any:
    """Where an infinity meets a factor whose sign is not certain."""
    infinite = ~np.isfinite(x.value)
    if not infinite.any() or y.exact:
        return np.False_
    pair = (infinite.astype(np.float64), (np.abs(y.value) <= y.radius).astype(np.float64) * (y.radius > 0))
    return np.matmul(*(reversed(pair) if swap else pair)) > 0


def _nan_largest_key(x: Any) -> Any:
    """The ordering key of argmax: NaN is the largest."""
    return np.where(np.isnan(x), np.inf, x)


def bound_argreduce(sign: float) -> Any:
    """For argmax (`sign` 1) and argmin (−1): how far away in index another element may win."""

    def rule(site: ErrorSite, x: IntervalArray, *, axis: int, keepdims: bool) -> IntervalArray:
        value = np.asarray(site.reference(x, axis=axis, keepdims=keepdims))
        if x.exact:
            return IntervalArray(value)
        won = value if keepdims else np.expand_dims(value, axis)
        low, high = (_nan_largest_key(sign * end) for end in interval_ends(x)[:: int(sign)])
        key, least = _nan_largest_key(sign * x.value.astype(np.float64)), low.max(axis=axis, keepdims=True)
        place = np.arange(x.shape[axis]).reshape([-1] + [1] * (-axis - 1))
        # Equals that are certain are no contest: the first one wins.
        tied = (key == np.take_along_axis(key, won, axis)) & (x.radius == 0)
        tied &= np.take_along_axis(x.radius, won, axis) == 0
        away = np.where((high >= least) & ~tied, np.abs(place - won), 0).max(axis=axis, keepdims=keepdims)
        return make_interval(value, away.astype(np.float64))

    return rule
