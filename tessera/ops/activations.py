"""Activations beside those of nn: softplus, mish, elu, leaky relu."""

from __future__ import annotations

import numpy as np

from tessera.op import lower, op
from tessera.ops.coerce import floating
from tessera.ops.elementwise import abs, exp, maximum, minimum, tanh, where
from tessera.ops.functions import expm1, log1p


@op(coerce=floating)
def softplus(x):
    """log(1 + exp(x)), without overflow.

    >>> import tessera as ts
    >>> ts.softplus([0.0, 1000.0])
    Tensor([   0.6931472, 1000.       ], f32)
    """
    return np.logaddexp(x, x.dtype.type(0))


@lower(softplus)
def _(x):
    return maximum(x, 0.0) + log1p(exp(-abs(x)))


@op(coerce=floating)
def mish(x):
    """`x` times tanh(softplus(x)) (Misra 2019)."""
    return x * np.tanh(np.logaddexp(x, x.dtype.type(0)))


@lower(mish)
def _(x):
    return x * tanh(softplus(x))


@op(coerce=floating)
def elu(x, *, alpha: float = 1.0):
    """`x` where it is positive, else alpha · (exp(x) - 1) (Clevert, Unterthiner and Hochreiter 2015)."""
    return np.where(x > 0, x, x.dtype.type(alpha) * np.expm1(np.minimum(x, 0)))


@lower(elu)
def _(x, *, alpha):
    return where(x > 0.0, x, alpha * expm1(minimum(x, 0.0)))


@op(coerce=floating)
def leaky_relu(x, *, slope: float = 0.01):
    """`x` where it is positive, else slope · x."""
    return np.where(x > 0, x, x.dtype.type(slope) * x)


@lower(leaky_relu)
def _(x, *, slope):
    return where(x > 0.0, x, slope * x)
