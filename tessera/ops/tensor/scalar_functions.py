"""Scalar functions: primitives with errors of their own (expm1, log1p, atan), composites of elementwise ops, and
nextafter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tessera.core.errors import DTypeError
from tessera.core.types import TensorType, bool_, f32, tf32
from tessera.ir.numerics import error_rules, reference_kernels
from tessera.ir.rules import FLOATS, STORAGE, Op, error, jvp, lower, op
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.api.dtype_info import FloatInfo, finfo
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import cast, full, sum_of_exact_partials, sum_of_partials, zero_jvp
from tessera.ops.tensor.coercion import coerce_floating, coerce_pointwise, coerce_rounding, composite
from tessera.ops.tensor.elementwise import (
    abs,
    ceil,
    cos,
    equal,
    exp,
    floor,
    greater,
    infer_comparison,
    infer_numeric,
    infer_same,
    less,
    log,
    maximum,
    minimum,
    not_equal,
    remainder,
    rsqrt,
    sin,
    sqrt,
    where,
)

PI = math.pi


def _define_primitive(**columns: Any) -> Callable[[Any], Op]:
    """A monotonically increasing function, and its error rule."""

    def define(ref: Any) -> Op:
        made = op(infer=infer_same, coerce=coerce_floating, pointwise=True, kinds=FLOATS, **columns)(ref)
        error(made)(error_rules.bound_monotone)
        return made

    return define


@_define_primitive(ulps=3.0, domain=(-4.0, 4.0), method=True)
def expm1(x):
    """exp(x) - 1, accurate near 0.

    >>> import tessera as ts
    >>> ts.expm1(1e-10)
    Tensor(1.e-10, f32)
    """
    return np.expm1(x)


jvp(expm1)(sum_of_partials(lambda t, out, x: t * (out + 1.0)))


@_define_primitive(ulps=2.0, domain=(-0.9, 6.0), method=True)
def log1p(x):
    """log(1 + x), accurate near 0."""
    return np.log1p(x)


jvp(log1p)(sum_of_partials(lambda t, out, x: t / (x + 1.0)))


@_define_primitive(ulps=5.0)
def atan(x):
    """The angle between -pi/2 and pi/2 whose tangent is `x`."""
    return np.arctan(x)


jvp(atan)(sum_of_partials(lambda t, out, x: t / (x * x + 1.0)))


@op(coerce=coerce_floating, domain=(0.01, 90.0), method=True)
def log10(x):
    """The base-10 logarithm of `x`."""
    return np.log10(x)


@lower(log10)
def _(x):
    return log(x) * (1 / math.log(10))


@op(coerce=coerce_floating, domain=(-1.4, 1.4), method=True)
def tan(x):
    """The tangent of `x`, in radians."""
    return np.tan(x)


@lower(tan)
def _(x):
    return sin(x) / cos(x)


jvp(tan)(sum_of_partials(lambda t, out, x: t * (out * out + 1.0)))


@op(coerce=coerce_floating, domain=(-5.0, 5.0), method=True)
def sinh(x):
    """The hyperbolic sine of `x`."""
    return np.sinh(x)


@lower(sinh)
def _(x):
    # Where exp(x) overflows and its half does not, the square of exp(x / 2) still has a value.
    size = abs(x)
    near, root = minimum(size, 1.0), exp(0.5 * size)
    found = where(size < 1.0, _sum_sinh_series(near), 0.5 * root * root - 0.5 / root / root)
    return where(x < 0.0, -found, where(not_equal(x, 0.0), found, x))


def _sum_sinh_series(x: Tensor) -> Tensor:
    """x + x³/3! + x⁵/5! + ... for |x| ≤ 1, where the subtraction of exponentials loses digits."""
    square: Tensor = x * x
    total: Tensor | float = 1.0
    for n in range(18 if x.dtype.bits == 64 else 10, 0, -2):
        total = square * (1.0 / (n * (n + 1))) * total + 1.0
    return x * total


@op(coerce=coerce_floating, domain=(-5.0, 5.0), method=True)
def cosh(x):
    """The hyperbolic cosine of `x`."""
    return np.cosh(x)


@lower(cosh)
def _(x):
    root = exp(0.5 * abs(x))
    return 0.5 * root * root + 0.5 / root / root


jvp(sinh)(sum_of_partials(lambda t, out, x: t * cosh(x)))
jvp(cosh)(sum_of_partials(lambda t, out, x: t * sinh(x)))


@op(coerce=coerce_floating)
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


@lower(sigmoid)
def _(x):
    return 1.0 / (1.0 + exp(-x))


# In terms of the result, which saturates to 0 or 1 where the terms of the formula overflow.
jvp(sigmoid)(sum_of_partials(lambda t, out, x: t * (out * (1.0 - out))))


@op(coerce=coerce_floating)
def atan2(y, x):
    """The angle of the point (x, y), from -pi to pi; the sign of a zero selects the side of an axis."""
    return np.arctan2(y, x)


@lower(atan2)
def _(y, x):
    high, low = maximum(abs(x), abs(y)), minimum(abs(x), abs(y))
    ratio = where(equal(high, 0.0), 0.0, where(equal(high, low), 1.0, low / high))
    angle = atan(ratio)
    angle = where(greater(abs(y), abs(x)), PI / 2 - angle, angle)
    angle = where(_has_negative_sign(x), PI - angle, angle)
    return where(_has_negative_sign(y), -angle, angle)


def _has_negative_sign(x):
    """Whether a number is negative or a negative zero."""
    return where(equal(x, 0.0), 1.0 / x < 0.0, x < 0.0)


def _angle_partial(t, x, y):
    # x / (x² + y²); the squares may overflow.
    size = hypot(x, y)
    return t * (x / size / size)


jvp(atan2)(sum_of_partials(lambda t, out, y, x: _angle_partial(t, x, y), lambda t, out, y, x: -_angle_partial(t, y, x)))


@op(coerce=coerce_floating, domain=(-1.0, 1.0))
def asin(x):
    """The angle between -pi/2 and pi/2 whose sine is `x`; NaN outside [-1, 1]."""
    return np.arcsin(x)


@lower(asin)
def _(x):
    return atan2(x, sqrt((1.0 - x) * (1.0 + x)))


@op(coerce=coerce_floating, domain=(-1.0, 1.0))
def acos(x):
    """The angle between 0 and pi whose cosine is `x`; NaN outside [-1, 1]."""
    return np.arccos(x)


@lower(acos)
def _(x):
    return atan2(sqrt((1.0 - x) * (1.0 + x)), x)


jvp(asin)(sum_of_partials(lambda t, out, x: t * rsqrt((1.0 - x) * (1.0 + x))))
jvp(acos)(sum_of_partials(lambda t, out, x: t * -rsqrt((1.0 - x) * (1.0 + x))))


@op(infer=infer_numeric, coerce=coerce_pointwise, domain=(1.0, 7.0))
def fmod(x, y):
    """The remainder of division toward zero; it has the sign of `x`.

    >>> import tessera as ts
    >>> ts.fmod([-7.0, 7.0], 4.0), ts.fmod([-7, 7], -4)
    (Tensor([-3.,  3.], f32), Tensor([-3,  3], int64))
    """
    return np.fmod(x, y)


@lower(fmod)
def _(x, y):
    if x.dtype.is_float:
        found = remainder(abs(x), abs(y))
        return where(_has_negative_sign(x), -found, found)
    found = remainder(x, y)
    return where(not_equal(found, 0) & (less(x, 0) ^ less(y, 0)), found - y, found) if x.dtype.kind == "int" else found


@op(infer=infer_numeric, coerce=coerce_pointwise, method=True)
def sign(x):
    """1 where `x` is positive, -1 where it is negative, 0 of both zeros; NaN stays."""
    return np.where(x > 0, x.dtype.type(1), np.where(x < 0, np.negative(np.ones((), x.dtype)), x + x.dtype.type(0)))


@lower(sign)
def _(x):
    if x.dtype.kind == "uint":
        return where(greater(x, 0), 1, x)
    rest = where(equal(x, 0), 0, x) if x.dtype.is_float else x  # a NaN, or a zero that may be -0
    return where(greater(x, 0), 1, where(less(x, 0), -1, rest))


@op(coerce=coerce_rounding, method=True)
def trunc(x):
    """`x` without its fraction: the nearest whole number toward zero."""
    return np.trunc(x)


@lower(trunc)
def _(x):
    return where(less(x, 0.0), ceil(x), floor(x))


jvp(sign, trunc)(zero_jvp)
jvp(fmod)(sum_of_partials(lambda t, out, x, y: t, lambda t, out, x, y: t * -trunc(x / y)))


@op(infer=infer_comparison, coerce=coerce_pointwise, method=True)
def isnan(x):
    """Whether `x` is NaN; no integer is."""
    return np.not_equal(x, x)


@lower(isnan)
def _(x):
    return not_equal(x, x)


@op(infer=infer_comparison, coerce=coerce_pointwise, method=True)
def isinf(x):
    """Whether `x` is an infinity of either sign; no integer is."""
    return np.isinf(x)


@lower(isinf)
def _(x):
    return equal(abs(x), math.inf) if x.dtype.is_float else _constant_mask(x, False)


@op(infer=infer_comparison, coerce=coerce_pointwise, method=True)
def isfinite(x):
    """Whether `x` is neither NaN nor an infinity; every integer is."""
    return np.isfinite(x)


@lower(isfinite)
def _(x):
    return less(abs(x), math.inf) if x.dtype.is_float else _constant_mask(x, True)


def _constant_mask(x, value):
    return full(shape=x.shape, value=value, dtype=bool_)


@op(coerce=coerce_pointwise)
def fma(x, y, z):
    """`x` times `y` plus `z`; a target may round once or twice."""
    return np.add(np.multiply(x, y), z)


@lower(fma)
def _(x, y, z):
    return x * y + z


@op(infer=infer_same, coerce=coerce_pointwise, name="clip")
def clipped(x, low, high):
    """`x` limited to the interval from `low` to `high`; NaN stays NaN."""
    at_least = reference_kernels.compute_extreme(np.maximum, x, low)
    return reference_kernels.compute_extreme(np.minimum, at_least, high)


@lower(clipped)
def _(x, low, high):
    return minimum(maximum(x, low), high)


@check_arguments
def clip(x: Any, min: Any = None, max: Any = None) -> Tensor:
    """`x` limited to the interval from `min` to `max`, numbers or tensors; None is no bound. NaN stays NaN.

    >>> clip([1.0, 5.0, 9.0], 2.0, max=7.0), clip([1, 5], min=3)
    (Tensor([2., 5., 7.], f32), Tensor([3, 5], int64))
    """
    if min is None or max is None:
        x = as_tensor(x) if min is None else maximum(x, min)
        return x if max is None else minimum(x, max)
    return clipped(x, min, max)


# Composite scalar functions: powers, signs, inverse hyperbolic functions, replacement of NaN.


LARGE_ARGUMENT = 2.0**28  # beyond it x² + 1 is x² in every type, and log(2x) is the answer
LOG_2 = math.log(2)


@op(infer=infer_numeric, coerce=coerce_pointwise, method=True)
def square(x):
    """`x` times itself.

    >>> import tessera as ts
    >>> ts.square([1.0, -3.0])
    Tensor([1., 9.], f32)
    """
    return np.multiply(x, x)


@lower(square)
def _(x):
    return x * x


@op(coerce=coerce_floating, method=True)
def reciprocal(x):
    """One over `x`; integers as f32."""
    return np.divide(x.dtype.type(1), x)


@lower(reciprocal)
def _(x):
    return 1.0 / x


@op(infer=infer_comparison, coerce=coerce_floating)
def signbit(x):
    """Whether `x` has its sign bit set: negative numbers and -0; of NaN it is False."""
    return np.signbit(x) & (x == x)


@lower(signbit)
def _(x):
    return where(equal(x, 0.0), 1.0 / x < 0.0, x < 0.0)


@op(coerce=coerce_floating)
def copysign(x, y):
    """The magnitude of `x` with the sign of `y`; a NaN counts as positive.

    >>> import tessera as ts
    >>> ts.copysign([1.0, -2.0], [-0.0, 3.0])
    Tensor([-1.,  2.], f32)
    """
    return np.where(np.signbit(y) & (y == y), -np.abs(x), np.abs(x))


@lower(copysign)
def _(x, y):
    return where(signbit(y), -abs(x), abs(x))


@op(coerce=coerce_floating)
def hypot(x, y):
    """The square root of x² + y², without overflow on the way; infinite where either is."""
    return np.hypot(x, y)


@lower(hypot)
def _(x, y):
    high, low = maximum(abs(x), abs(y)), minimum(abs(x), abs(y))
    ratio = low / where(equal(high, 0.0), 1.0, high)
    return where(isinf(x) | isinf(y), math.inf, high * sqrt(ratio * ratio + 1.0))


def _hypot_partial(t, out, x):
    # The point (0, 0) has no derivative; 0 is the subgradient of least norm.
    return t * (x / where(equal(out, 0.0), 1.0, out))


jvp(hypot)(
    sum_of_partials(lambda t, out, x, y: _hypot_partial(t, out, x), lambda t, out, x, y: _hypot_partial(t, out, y))
)


@op(coerce=coerce_floating)
def logaddexp(x, y):
    """log(exp(x) + exp(y)), without overflow.

    >>> import tessera as ts
    >>> ts.logaddexp(1000.0, 1000.0)
    Tensor(1000.6932, f32)
    """
    return np.logaddexp(x, y)


@lower(logaddexp)
def _(x, y):
    apart = where(equal(x, y), 0.0, abs(x - y))
    return maximum(x, y) + log1p(exp(-apart))


def _subtract_exponents(x, y):
    return where(equal(x, y) & isinf(x), 0.0, x - y)


jvp(logaddexp)(
    sum_of_partials(
        lambda t, out, x, y: t * sigmoid(_subtract_exponents(x, y)),
        lambda t, out, x, y: t * sigmoid(_subtract_exponents(y, x)),
    )
)


@op(coerce=coerce_floating)
def asinh(x):
    """The number whose hyperbolic sine is `x`."""
    return np.arcsinh(x)


@lower(asinh)
def _(x):
    size = abs(x)
    near = minimum(size, LARGE_ARGUMENT)
    found = log1p(near + near * near / (sqrt(near * near + 1.0) + 1.0))
    found = where(size > LARGE_ARGUMENT, log(size) + LOG_2, found)
    return where(x < 0.0, -found, where(not_equal(x, 0.0), found, x))


jvp(asinh)(sum_of_partials(lambda t, out, x: t / hypot(x, 1.0)))


@op(coerce=coerce_floating)
def acosh(x):
    """The number ≥ 0 whose hyperbolic cosine is `x`; NaN below 1."""
    return np.arccosh(x)


@lower(acosh)
def _(x):
    over = minimum(x, LARGE_ARGUMENT) - 1.0
    return where(x > LARGE_ARGUMENT, log(x) + LOG_2, log1p(over + sqrt(over) * sqrt(over + 2.0)))


# The product of both roots does not overflow where that of their arguments does.
jvp(acosh)(sum_of_partials(lambda t, out, x: t * (rsqrt(x - 1.0) * rsqrt(x + 1.0))))


@op(coerce=coerce_floating)
def atanh(x):
    """The number whose hyperbolic tangent is `x`; NaN outside [-1, 1]."""
    return np.arctanh(x)


@lower(atanh)
def _(x):
    size = abs(x)
    found = 0.5 * log1p(2.0 * size / (1.0 - size))
    return where(x < 0.0, -found, where(not_equal(x, 0.0), found, x))


jvp(atanh)(sum_of_partials(lambda t, out, x: t / ((1.0 - x) * (1.0 + x))))


@check_arguments
def positive(x: Any) -> Tensor:
    """`x` itself, as the unary operator +."""
    return as_tensor(x)


@composite
def lerp(x: Any, y: Any, weight: Any) -> Tensor:
    """x + weight · (y - x): `x` at weight 0, towards `y` at 1.

    >>> lerp([0.0], [10.0], 0.25)
    Tensor([2.5], f32)
    """
    x = as_tensor(x)
    return x + (as_tensor(y) - x) * weight


@check_arguments
def nan_to_num(x: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """`x` with NaN replaced by `nan` and infinities by the largest and least number, or those given.

    >>> nan_to_num([float("nan"), 1.0, float("inf")], posinf=9.0)
    Tensor([0., 1., 9.], f32)
    """
    x = as_tensor(x)
    if not x.dtype.is_float:
        return x
    top = float(ml_dtypes.finfo(x.dtype.numpy).max)
    high, low = (top if posinf is None else posinf), (-top if neginf is None else neginf)
    out = where(equal(x, math.inf), high, where(equal(x, -math.inf), low, x))
    return where(not_equal(x, x), nan, out)


# Adjacent numbers of a format, by Rump, Zimmermann, Boldo and Melquiond, "Computing predecessor and successor in
# rounding to nearest" (2009); they use arithmetic alone, without access to bits, so that every target has them.


def _infer_nextafter(x: TensorType, y: TensorType) -> TensorType:
    if x.dtype == tf32:
        raise DTypeError("nextafter of tf32 is not defined", received=str(x), suggestion="cast to ts.f32")
    return x


@op(infer=_infer_nextafter, coerce=coerce_floating, numerics=STORAGE)
def nextafter(x, y):
    """The number of the type adjacent to `x` in the direction of `y`; `y` where they are equal, NaN where either is.

    The successor of the largest number is the overflow value of the type.

    >>> import tessera as ts
    >>> ts.nextafter(1.0, [0.0, 2.0]) - 1.0
    Tensor([-5.9604645e-08,  1.1920929e-07], f32)
    """
    return np.where(x == y, y, np.nextafter(x, y))  # for f16 NumPy returns x, which may be the zero of the other sign


@lower(nextafter)
def _(x, y):
    info = finfo(x.dtype)
    wide, target = (x, y) if x.dtype.bits >= f32.bits else (cast(x, dtype=f32), cast(y, dtype=f32))
    size, out = abs(wide), greater(target, wide)
    moved = _step_to_neighbour(wide, size, out, info)
    moved = where(equal(moved, 0.0), copysign(moved, wide), moved)  # from the smallest number to a zero of its sign
    moved = where(equal(size, math.inf), copysign(info.max, wide), moved)
    least = full(shape=(), value=info.smallest_subnormal, dtype=wide.dtype)
    moved = where(equal(wide, 0.0), where(out, least, -least), moved)
    found = where(equal(wide, target), target, moved)
    found = where(not_equal(wide, wide) | not_equal(target, target), math.nan, found)
    return cast(found, dtype=x.dtype)


jvp(nextafter)(sum_of_exact_partials(lambda t, out, x, y: t, None))  # the derivative of the identity


def _step_to_neighbour(x: Tensor, size: Tensor, out: Tensor, info: FloatInfo) -> Tensor:
    """A value that rounds to the neighbour of a finite number: the number ± 0.5 to 1.5 times their distance.

    Among subnormal numbers the distance is constant. A little above them the product is computed on scaled numbers, so
    that it is not rounded to a multiple of the smallest one.
    """
    unit, one = info.eps / 2, full(shape=(), value=1, dtype=x.dtype)
    up = 2 / unit
    scale = where(less(size, info.smallest_normal * up), up, one)
    step = size * scale * (unit * (1 + 2 * unit))
    small = less(size, info.smallest_normal * 2)
    step, scale = where(small, info.smallest_subnormal, step), where(small, 1.0, scale)
    return where(out, x * scale + step, x * scale - step) / scale
