"""Scalar functions made of others: powers and signs, areas of the hyperbola, what replaces NaN."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from tessera.op import lower, op
from tessera.ops.arguments import typed
from tessera.ops.coerce import floating, pointwise
from tessera.ops.elementwise import abs, equal, exp, log, maximum, minimum, not_equal, number, sqrt, truth, where
from tessera.ops.functions import isinf, log1p
from tessera.tensor import Tensor, as_tensor

LARGE = 2.0**28  # beyond it x² + 1 is x² in every type, and log(2x) is the answer
LOG_2 = math.log(2)


@op(infer=number, coerce=pointwise)
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


@op(coerce=floating)
def reciprocal(x):
    """One over `x`; integers as f32."""
    return np.divide(x.dtype.type(1), x)


@lower(reciprocal)
def _(x):
    return 1.0 / x


@op(infer=truth, coerce=floating)
def signbit(x):
    """Whether `x` has its sign bit set: negative numbers and -0; of NaN it is False."""
    return np.signbit(x) & (x == x)


@lower(signbit)
def _(x):
    return where(equal(x, 0.0), 1.0 / x < 0.0, x < 0.0)


@op(coerce=floating)
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


@op(coerce=floating)
def hypot(x, y):
    """The square root of x² + y², without overflow on the way; infinite where either is."""
    return np.hypot(x, y)


@lower(hypot)
def _(x, y):
    high, low = maximum(abs(x), abs(y)), minimum(abs(x), abs(y))
    ratio = low / where(equal(high, 0.0), 1.0, high)
    return where(isinf(x) | isinf(y), math.inf, high * sqrt(ratio * ratio + 1.0))


@op(coerce=floating)
def logaddexp(x, y):
    """log(exp(x) + exp(y)), without overflow.

    >>> import tessera as ts
    >>> ts.logaddexp(1000.0, 1000.0)
    Tensor(1000.6931, f32)
    """
    return np.logaddexp(x, y)


@lower(logaddexp)
def _(x, y):
    apart = where(equal(x, y), 0.0, abs(x - y))
    return maximum(x, y) + log1p(exp(-apart))


@op(coerce=floating)
def asinh(x):
    """The number whose hyperbolic sine is `x`."""
    return np.arcsinh(x)


@lower(asinh)
def _(x):
    size = abs(x)
    near = minimum(size, LARGE)
    found = log1p(near + near * near / (sqrt(near * near + 1.0) + 1.0))
    found = where(size > LARGE, log(size) + LOG_2, found)
    return where(x < 0.0, -found, where(not_equal(x, 0.0), found, x))


@op(coerce=floating)
def acosh(x):
    """The number ≥ 0 whose hyperbolic cosine is `x`; NaN below 1."""
    return np.arccosh(x)


@lower(acosh)
def _(x):
    over = minimum(x, LARGE) - 1.0
    return where(x > LARGE, log(x) + LOG_2, log1p(over + sqrt(over * (over + 2.0))))


@op(coerce=floating)
def atanh(x):
    """The number whose hyperbolic tangent is `x`; NaN outside [-1, 1]."""
    return np.arctanh(x)


@lower(atanh)
def _(x):
    size = abs(x)
    found = 0.5 * log1p(2.0 * size / (1.0 - size))
    return where(x < 0.0, -found, where(not_equal(x, 0.0), found, x))


@typed
def positive(x: Any) -> Tensor:
    """`x` itself: what +x means."""
    return as_tensor(x)


@typed
def lerp(x: Any, y: Any, weight: Any) -> Tensor:
    """x + weight · (y - x): `x` at weight 0, towards `y` at 1.

    >>> lerp([0.0], [10.0], 0.25)
    Tensor([2.5], f32)
    """
    x = as_tensor(x)
    return x + (as_tensor(y) - x) * weight


@typed
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
