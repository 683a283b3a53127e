"""More scalar functions: three primitives with errors of their own, and composites of what is there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.numerics import bounds
from tessera.op import Op, error, jvp, lower, op
from tessera.ops.arguments import typed
from tessera.ops.basic import full
from tessera.ops.coerce import floating, pointwise, rounding
from tessera.ops.derivatives import along, still
from tessera.ops.elementwise import (
    abs,
    ceil,
    cos,
    equal,
    exp,
    floor,
    greater,
    less,
    log,
    maximum,
    minimum,
    not_equal,
    number,
    same,
    sin,
    sqrt,
    truth,
    where,
)
from tessera.tensor import Tensor, as_tensor
from tessera.types import bool_

PI = math.pi


def _primitive(ref: Callable[..., Any]) -> Op:
    """A function that rises everywhere, computed within the ulps of the table."""
    made = op(infer=same, coerce=floating, pointwise=True)(ref)
    error(made)(bounds.monotone)
    return made


@_primitive
def expm1(x):
    """exp(x) - 1, exact to the last digits near 0.

    >>> import tessera as ts
    >>> ts.expm1(1e-10)
    Tensor(1.e-10, f32)
    """
    return np.expm1(x)


jvp(expm1)(along(lambda t, out, x: t * (out + 1.0)))


@_primitive
def log1p(x):
    """log(1 + x), exact to the last digits near 0."""
    return np.log1p(x)


jvp(log1p)(along(lambda t, out, x: t / (x + 1.0)))


@_primitive
def atan(x):
    """The angle between -pi/2 and pi/2 whose tangent is `x`."""
    return np.arctan(x)


jvp(atan)(along(lambda t, out, x: t / (x * x + 1.0)))


@op(coerce=floating)
def log10(x):
    """The base-10 logarithm of `x`."""
    return np.log10(x)


@lower(log10)
def _(x):
    return log(x) * (1 / math.log(10))


@op(coerce=floating)
def tan(x):
    """The tangent of `x`, in radians."""
    return np.tan(x)


@lower(tan)
def _(x):
    return sin(x) / cos(x)


@op(coerce=floating)
def sinh(x):
    """The hyperbolic sine of `x`."""
    return np.sinh(x)


@lower(sinh)
def _(x):
    # Where exp(x) overflows and its half does not, the square of exp(x / 2) still has a value.
    size = abs(x)
    near, root = expm1(minimum(size, 1.0)), exp(0.5 * size)
    found = where(size < 1.0, 0.5 * (near + near / (near + 1.0)), 0.5 * root * root - 0.5 / root / root)
    return where(x < 0.0, -found, found)


@op(coerce=floating)
def cosh(x):
    """The hyperbolic cosine of `x`."""
    return np.cosh(x)


@lower(cosh)
def _(x):
    root = exp(0.5 * abs(x))
    return 0.5 * root * root + 0.5 / root / root


@op(coerce=floating)
def atan2(y, x):
    """The angle of the point (x, y), from -pi to pi; the signs of zeros say on which side of an axis it is."""
    return np.arctan2(y, x)


@lower(atan2)
def _(y, x):
    high, low = maximum(abs(x), abs(y)), minimum(abs(x), abs(y))
    ratio = where(equal(high, 0.0), 0.0, where(equal(high, low), 1.0, low / high))
    angle = atan(ratio)
    angle = where(greater(abs(y), abs(x)), PI / 2 - angle, angle)
    angle = where(_turned(x), PI - angle, angle)
    return where(_turned(y), -angle, angle)


def _turned(x):
    """Whether a number, or a zero, has the sign of those below 0."""
    return where(equal(x, 0.0), 1.0 / x < 0.0, x < 0.0)


@op(coerce=floating)
def asin(x):
    """The angle between -pi/2 and pi/2 whose sine is `x`; NaN outside [-1, 1]."""
    return np.arcsin(x)


@lower(asin)
def _(x):
    return atan2(x, sqrt((1.0 - x) * (1.0 + x)))


@op(coerce=floating)
def acos(x):
    """The angle between 0 and pi whose cosine is `x`; NaN outside [-1, 1]."""
    return np.arccos(x)


@lower(acos)
def _(x):
    return atan2(sqrt((1.0 - x) * (1.0 + x)), x)


@op(infer=number, coerce=pointwise)
def sign(x):
    """1 where `x` is positive, -1 where it is negative, 0 of both zeros; NaN stays."""
    return np.where(x > 0, x.dtype.type(1), np.where(x < 0, np.negative(np.ones((), x.dtype)), x + x.dtype.type(0)))


@lower(sign)
def _(x):
    if x.dtype.kind == "uint":
        return where(greater(x, 0), 1, x)
    rest = where(equal(x, 0), 0, x) if x.dtype.is_float else x  # a NaN, or a zero that may be -0
    return where(greater(x, 0), 1, where(less(x, 0), -1, rest))


@op(coerce=rounding)
def trunc(x):
    """`x` without its fraction: the nearest whole number toward zero."""
    return np.trunc(x)


@lower(trunc)
def _(x):
    return where(less(x, 0.0), ceil(x), floor(x))


jvp(sign, trunc)(still)


@op(infer=truth, coerce=pointwise)
def isnan(x):
    """Whether `x` is NaN; no integer is."""
    return np.not_equal(x, x)


@lower(isnan)
def _(x):
    return not_equal(x, x)


@op(infer=truth, coerce=pointwise)
def isinf(x):
    """Whether `x` is an infinity of either sign; no integer is."""
    return np.isinf(x)


@lower(isinf)
def _(x):
    return equal(abs(x), math.inf) if x.dtype.is_float else _nowhere(x, False)


@op(infer=truth, coerce=pointwise)
def isfinite(x):
    """Whether `x` is neither NaN nor an infinity; every integer is."""
    return np.isfinite(x)


@lower(isfinite)
def _(x):
    return less(abs(x), math.inf) if x.dtype.is_float else _nowhere(x, True)


def _nowhere(x, value):
    return full(shape=x.shape, value=value, dtype=bool_)


@op(coerce=pointwise)
def fma(x, y, z):
    """`x` times `y` plus `z`; a target may round once or twice."""
    return np.add(np.multiply(x, y), z)


@lower(fma)
def _(x, y, z):
    return x * y + z


@op(infer=same, coerce=pointwise, name="clip")
def clipped(x, low, high):
    """`x` brought to lie from `low` to `high`; NaN stays NaN."""
    return np.minimum(np.maximum(x, low), high)


@lower(clipped)
def _(x, low, high):
    return minimum(maximum(x, low), high)


@typed
def clip(x: Any, min: Any = None, max: Any = None) -> Tensor:
    """`x` brought to lie from `min` to `max`, numbers or tensors; None is no bound. NaN stays NaN.

    >>> clip([1.0, 5.0, 9.0], 2.0, max=7.0), clip([1, 5], min=3)
    (Tensor([2., 5., 7.], f32), Tensor([3, 5], int64))
    """
    if min is None or max is None:
        x = as_tensor(x) if min is None else maximum(x, min)
        return x if max is None else minimum(x, max)
    return clipped(x, min, max)
