"""Composite reductions: product, any, all, standard deviation, logsumexp, norms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, here
from tessera.op import STORAGE, lower, op
from tessera.ops.arguments import typed
from tessera.ops.basic import cast, plain
from tessera.ops.coerce import floating
from tessera.ops.elementwise import abs, equal, exp, greater, log, not_equal, pow, sqrt, where
from tessera.ops.reduce import Axes, _axes, _total, max, min, reduced, share, sum, var
from tessera.ops.shape import count, pad, permute, reshape, slice_
from tessera.tensor import Tensor, as_tensor
from tessera.types import TensorType, bool_, f32


def _product_type(x: TensorType, *, axis: Axes, keepdims: bool) -> TensorType:
    return x.with_shape(reduced(x, axis, keepdims)).with_dtype(_total(x.dtype))


@op(infer=_product_type, coerce=plain, canonical=_axes)
def prod(x, *, axis: Any = None, keepdims: bool = False):
    """The product of the elements along `axis` (all when None); narrower integers and bools give int64.

    >>> import tessera as ts
    >>> ts.prod([2, 3, 4])
    Tensor(24, int64)
    """
    return np.prod(x, axis=axis, keepdims=keepdims, dtype=np.int64 if x.dtype.kind in "iub" else x.dtype)


@lower(prod)
def _(x, *, axis, keepdims):
    shape = reduced(x.type, axis, keepdims)
    kept = [a for a in range(-x.ndim, 0) if a not in axis]
    rows = permute(cast(x, dtype=_total(x.dtype)), axes=(*kept, *axis))
    rows = reshape(rows, shape=(count([x.shape[a] for a in kept]), count([x.shape[a] for a in axis])))
    n = int(rows.shape[1])
    whole = 1 << (n - 1).bit_length() if n else 1
    rows = pad(rows, low=(0, 0), high=(0, whole - n), value=1)
    while whole > 1:  # a tree of halves: log2(n) products of whole rows
        whole //= 2
        left, right = ((0, 0), (rows.shape[0], whole)), ((0, whole), (rows.shape[0], 2 * whole))
        rows = slice_(rows, start=left[0], stop=left[1]) * slice_(rows, start=right[0], stop=right[1])
    return reshape(rows, shape=shape)


def _truth_type(x: TensorType, *, axis: Axes, keepdims: bool) -> TensorType:
    return TensorType(reduced(x, axis, keepdims), bool_)


def _holds(x: Tensor) -> Tensor:
    return x if x.dtype is bool_ else not_equal(x, 0)


@op(infer=_truth_type, coerce=plain, canonical=_axes, numerics=STORAGE)
def any(x, *, axis: Any = None, keepdims: bool = False):
    """Whether any element along `axis` is true (not zero); False for none at all."""
    return np.any(x != 0, axis=axis, keepdims=keepdims)


@lower(any)
def _(x, *, axis, keepdims):
    return greater(sum(_holds(x), axis=axis, keepdims=keepdims), 0)


@op(infer=_truth_type, coerce=plain, canonical=_axes, numerics=STORAGE)
def all(x, *, axis: Any = None, keepdims: bool = False):
    """Whether every element along `axis` is true (not zero); True for none at all."""
    return np.all(x != 0, axis=axis, keepdims=keepdims)


@lower(all)
def _(x, *, axis, keepdims):
    return equal(sum(~_holds(x), axis=axis, keepdims=keepdims), 0)


@op(coerce=floating, canonical=lambda x, *, correction, **a: {"correction": float(correction), **_axes(x, **a)})
def std(x, *, axis: Any = None, keepdims: bool = False, correction: float = 0.0):
    """The standard deviation along `axis`: the square root of `var` with n - `correction` below."""
    count = math.prod(x.shape[a] for a in axis)
    return np.sqrt(np.var(x, axis=axis, keepdims=keepdims) * x.dtype.type(count * share(count - correction)))


@lower(std)
def _(x, *, axis, keepdims, correction):
    return sqrt(var(x, axis=axis, keepdims=keepdims, correction=correction))


@op(coerce=floating, canonical=_axes)
def logsumexp(x, *, axis: Any = None, keepdims: bool = False):
    """log of the sum of exp(x) along `axis`, without overflow.

    >>> import tessera as ts
    >>> ts.logsumexp([1000.0, 1000.0])
    Tensor(1000.6931, f32)
    """
    top = np.max(x, axis=axis, keepdims=True)
    shift = np.where(np.isinf(top), x.dtype.type(0), top)
    total = np.log(np.sum(np.exp(x - shift), axis=axis, keepdims=True)) + shift
    return total if keepdims else np.squeeze(total, axis=axis)


@lower(logsumexp)
def _(x, *, axis, keepdims):
    top = max(x, axis=axis, keepdims=True)
    shift = where(equal(abs(top), math.inf), 0.0, top)
    total = log(sum(exp(x - shift), axis=axis, keepdims=True)) + shift
    return total if keepdims else reshape(total, shape=reduced(x.type, axis, False))


@typed
def norm(x: Any, ord: Any = 2, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The `ord`-norm of the elements along `axis` (all of them when None) taken as vectors.

    `ord`: 0 counts the elements that are not zero, inf and -inf give the largest and smallest magnitude, any other p
    gives (Σ|x|^p)^(1/p). Of a matrix, 2 over both axes is the Frobenius norm. Scaled by the largest magnitude
    for p = 2, so that squares neither overflow nor vanish.

    >>> norm([3.0, 4.0])
    Tensor(5., f32)
    """
    x = as_tensor(x)
    if not isinstance(ord, (int, float)):
        raise ArgumentError(f"there is no norm {ord!r}", location=here(), expected="a number, inf or -inf")
    size = abs(x if x.dtype.is_float else cast(x, dtype=f32))
    if ord in (math.inf, -math.inf):
        return (max if ord > 0 else min)(size, axis=axis, keepdims=keepdims)
    if ord == 0:
        return cast(sum(not_equal(size, 0), axis=axis, keepdims=keepdims), dtype=size.dtype)
    if ord == 1:
        return sum(size, axis=axis, keepdims=keepdims)
    return _euclidean(size, axis, keepdims) if ord == 2 else pow(
        sum(pow(size, float(ord)), axis=axis, keepdims=keepdims), 1.0 / ord
    )  # fmt: skip


def _euclidean(size: Tensor, axis: Any, keepdims: bool) -> Tensor:
    if 0 in size.shape:
        return sqrt(sum(size * size, axis=axis, keepdims=keepdims))
    top = max(size, axis=axis, keepdims=True)
    scale = where(equal(top, 0.0) | equal(top, math.inf), 1.0, top)
    unit = size / scale
    total = sqrt(sum(unit * unit, axis=axis, keepdims=True)) * scale
    return total if keepdims else reshape(total, shape=sum(size, axis=axis).shape)
