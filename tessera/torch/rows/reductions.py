"""Reduction rows: sums, extrema, moments, scans, sorting, and softmax (ATen's reductions)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.types import DType, bool_, int32, int64, uint8
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor.basic import cast, splat
from tessera.ops.tensor.nn import log_softmax, softmax
from tessera.ops.tensor.rearrange import take_along_axis
from tessera.ops.tensor.running_extremes import cummax, cummin
from tessera.ops.tensor.scalar_functions import isnan
from tessera.ops.tensor.shape import iota, reshape
from tessera.ops.tensor.sorting import argsort
from tessera.torch.rows.elementwise import convert_element_type
from tessera.torch.rows.shapes import slice_axis
from tessera.torch.table import aten, aten_first, floating, narrow_to, wide, zeros


def axes_of(x: Tensor, dim: Any) -> tuple[int, ...]:
    """The axes that a reduction runs over; none named means all."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(x.ndim))
    return tuple(d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)) if x.ndim else ()


def reduce_over(function: Callable[..., Any], x: Tensor, dim: Any, keepdim: bool, **attrs: Any) -> Tensor:
    """A reduction over axes; over none it leaves `x` as it is, as a function of an axis of size 1."""
    if x.ndim:
        return function(x, axis=axes_of(x, dim), keepdims=keepdim, **attrs)
    return reshape(function(reshape(x, shape=(1,)), axis=(0,), keepdims=False, **attrs), shape=())


def _sum(x: Tensor, dim: Any, keepdim: bool, dtype: DType | None) -> Tensor:
    out = dtype or (x.dtype if x.dtype.is_float else int64)
    return narrow_to(reduce_over(r.sum, wide(convert_element_type(x, out)), dim, keepdim), out)


@aten("sum.default")
def _(x, dtype=None):
    return _sum(x, None, False, dtype)


@aten("sum.dim_IntList")
def _(x, dim=None, keepdim=False, dtype=None):
    return _sum(x, dim, keepdim, dtype)


@aten("mean.default")
def _(x, dtype=None):
    return _mean(x, None, False, dtype)


@aten("mean.dim")
def _(x, dim=None, keepdim=False, dtype=None):
    return _mean(x, dim, keepdim, dtype)


def _mean(x: Tensor, dim: Any, keepdim: bool, dtype: DType | None) -> Tensor:
    x = convert_element_type(x, dtype or x.dtype)
    count = math.prod(x.shape[a] for a in axes_of(x, dim))
    total = reduce_over(r.sum, wide(x), dim, keepdim)
    mean = e.div(total, float(count)) if count else total * math.nan
    return narrow_to(mean, x.dtype)


@aten("prod.default")
def _(x, dtype=None):
    return _product(x, None, False, dtype)


@aten("prod.dim_int")
def _(x, dim, keepdim=False, dtype=None):
    return _product(x, dim, keepdim, dtype)


def _product(x: Tensor, dim: Any, keepdim: bool, dtype: DType | None) -> Tensor:
    out = dtype or (x.dtype if x.dtype.is_float else int64)
    return narrow_to(reduce_over(r.prod, wide(convert_element_type(x, out)), dim, keepdim), out)


@aten("amax.default")
def _(x, dim=(), keepdim=False):
    return _extremum(r.max, x, dim, keepdim)


@aten("amin.default")
def _(x, dim=(), keepdim=False):
    return _extremum(r.min, x, dim, keepdim)


def _extremum(function: Callable[..., Any], x: Tensor, dim: Any, keepdim: bool) -> Tensor:
    if x.dtype.kind == "bool":
        return reduce_over(r.any if function is r.max else r.all, x, dim, keepdim)
    return reduce_over(function, x, dim, keepdim)


@aten("max.default")
def _(x):
    return _extremum(r.max, x, None, False)


@aten("min.default")
def _(x):
    return _extremum(r.min, x, None, False)


@aten("aminmax.default")
def _(x, dim=None, keepdim=False):
    return _extremum(r.min, x, dim, keepdim), _extremum(r.max, x, dim, keepdim)


@aten("max.dim")
def _(x, dim, keepdim=False):
    return _extremum_with_index(r.argmax, x, dim, keepdim)


@aten("min.dim")
def _(x, dim, keepdim=False):
    return _extremum_with_index(r.argmin, x, dim, keepdim)


@aten_first("max.dim")
def _(x, dim, keepdim=False):
    return _extremum(r.max, x, dim, keepdim), None


@aten_first("min.dim")
def _(x, dim, keepdim=False):
    return _extremum(r.min, x, dim, keepdim), None


def _extremum_with_index(function: Callable[..., Any], x: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    if not x.ndim:
        return x, zeros((), int64)
    axis = dim % x.ndim
    at = arg_extremum(function, x, axis)
    found = take_along_axis(x, at, axis)
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    return (found, at) if keepdim else (reshape(found, shape=shape), reshape(at, shape=shape))


def arg_extremum(function: Callable[..., Any], x: Tensor, axis: int) -> Tensor:
    """The index of the first extremum along an axis, which is kept; NaN is one, as it is for `function`."""
    y = cast(x, dtype=uint8) if x.dtype.kind == "bool" else x
    return cast(function(y, axis=axis, keepdims=True), dtype=int64)


@aten("argmax.default")
def _(x, dim=None, keepdim=False):
    return _arg_reduce(r.argmax, x, dim, keepdim)


@aten("argmin.default")
def _(x, dim=None, keepdim=False):
    return _arg_reduce(r.argmin, x, dim, keepdim)


def _arg_reduce(function: Callable[..., Any], x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    if not x.ndim:
        return zeros((), int64)
    if dim is None:
        found = arg_extremum(function, reshape(x, shape=(-1,)), 0)
        return reshape(found, shape=(1,) * x.ndim if keepdim else ())
    axis = dim % x.ndim
    found = arg_extremum(function, x, axis)
    return found if keepdim else reshape(found, shape=x.shape[:axis] + x.shape[axis + 1 :])


def _truth(function: Callable[..., Any], x: Tensor, dim: Any, keepdim: bool) -> Tensor:
    truth = reduce_over(function, convert_element_type(x, bool_), dim, keepdim)
    return cast(truth, dtype=uint8) if x.dtype == uint8 else truth


for _name, _function in {"any": r.any, "all": r.all}.items():
    aten(f"{_name}.default")(lambda x, function=_function: _truth(function, x, None, False))
    aten(f"{_name}.dim", f"{_name}.dims")(
        lambda x, dim=None, keepdim=False, function=_function: _truth(function, x, dim, keepdim)
    )


# Moments.


@aten("var.correction")
def _(x, dim=None, correction=None, keepdim=False):
    return variance(x, dim, 1 if correction is None else correction, keepdim)


@aten("var.dim")
def _(x, dim=None, unbiased=True, keepdim=False):
    return variance(x, dim, int(unbiased), keepdim)


@aten("var.default")
def _(x, unbiased=True):
    return variance(x, None, int(unbiased), False)


@aten("std.correction")
def _(x, dim=None, correction=None, keepdim=False):
    return narrow_to(e.sqrt(wide(variance(wide(x), dim, 1 if correction is None else correction, keepdim))), x.dtype)


@aten("var_mean.correction")
def _(x, dim=None, correction=None, keepdim=False):
    return variance(x, dim, 1 if correction is None else correction, keepdim), _mean(x, dim, keepdim, None)


def variance(x: Tensor, dim: Any, correction: float, keepdim: bool) -> Tensor:
    """The variance over axes, with the divisor n - correction."""
    y = wide(x)
    y = y if y.ndim else reshape(y, shape=(1,))
    axes = axes_of(y, dim)
    count = math.prod(y.shape[a] for a in axes)
    middle = (
        e.div(r.sum(y, axis=axes, keepdims=True), float(count)) if count else splat(math.nan, y.type.with_shape(()))
    )
    apart = y - middle
    total = r.sum(apart * apart, axis=axes, keepdims=keepdim and x.ndim > 0)
    out = e.div(total, float(max(count - correction, 0))) if count else total * math.nan
    return narrow_to(out, x.dtype)


@aten("logsumexp.default")
def _(x, dim, keepdim=False):
    return reduce_over(r.logsumexp, floating(x), dim, keepdim)


@aten("linalg_vector_norm.default")
def _(x, ord=2, dim=None, keepdim=False, dtype=None):
    out = dtype or x.dtype
    y = wide(convert_element_type(x, out))
    return narrow_to(norm_of(e.abs(y), ord, dim, keepdim), out)


def norm_of(size: Tensor, ord: float, dim: Any, keepdim: bool) -> Tensor:
    """The p-norm over axes of magnitudes."""
    if math.isinf(ord):
        return reduce_over(r.max if ord > 0 else r.min, size, dim, keepdim)
    if ord == 0:
        return reduce_over(r.sum, cast(e.not_equal(size, 0.0), dtype=size.dtype), dim, keepdim)
    if ord == 1:
        return reduce_over(r.sum, size, dim, keepdim)
    if ord == 2:
        return e.sqrt(reduce_over(r.sum, size * size, dim, keepdim))
    return e.pow(reduce_over(r.sum, e.pow(size, float(ord)), dim, keepdim), 1.0 / ord)


# Scans.


@aten("cumsum.default")
def _(x, dim, dtype=None):
    return _scan(r.cumsum, x, dim, dtype)


@aten("cumprod.default")
def _(x, dim, dtype=None):
    return _scan(r.cumprod, x, dim, dtype)


def _scan(function: Callable[..., Any], x: Tensor, dim: int, dtype: DType | None) -> Tensor:
    out = dtype or (x.dtype if x.dtype.is_float else int64)
    y = wide(convert_element_type(x, out))
    return narrow_to(function(y, axis=dim) if y.ndim else y, out)


# Order.


@aten("sort.default")
def _(x, dim=-1, descending=False):
    return sort_along(x, dim, descending)


@aten("sort.stable")
def _(x, stable=None, dim=-1, descending=False):
    return sort_along(x, dim, descending)


def sort_along(x: Tensor, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    """The sorted elements and their indices."""
    if not x.ndim:
        return x, zeros((), int64)
    at = order_along(x, dim, descending)
    return take_along_axis(x, at, dim), at


def order_along(x: Tensor, dim: int, descending: bool) -> Tensor:
    """The indices that sort the elements along an axis."""
    return argsort(cast(x, dtype=uint8) if x.dtype.kind == "bool" else x, axis=dim, descending=descending)


@aten("argsort.default")
def _(x, dim=-1, descending=False):
    return sort_along(x, dim, descending)[1]


@aten("argsort.stable")
def _(x, stable, dim=-1, descending=False):
    return sort_along(x, dim, descending)[1]


@aten("topk.default")
def _(x, k, dim=-1, largest=True, sorted=True):
    if not x.ndim:
        return (x, zeros((), int64)) if k else (zeros((0,), x.dtype), zeros((0,), int64))
    at = slice_axis(order_along(x, dim, largest), dim % x.ndim, 0, k)
    return take_along_axis(x, at, dim), at


# Softmax and its derivative.


@aten("_softmax.default")
def _(x, dim, half_to_float=False):
    return _softmax(softmax, x, dim, half_to_float)


@aten("_log_softmax.default")
def _(x, dim, half_to_float=False):
    return _softmax(log_softmax, x, dim, half_to_float)


@aten("softmax.int")
def _(x, dim, dtype=None):
    return _softmax(softmax, convert_element_type(x, dtype or x.dtype), dim, False)


@aten("log_softmax.int")
def _(x, dim, dtype=None):
    return _softmax(log_softmax, convert_element_type(x, dtype or x.dtype), dim, False)


def _softmax(function: Callable[..., Any], x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    y = wide(x) if half_to_float else x
    if not y.ndim:
        return reshape(function(reshape(y, shape=(1,)), axis=0), shape=())
    return function(y, axis=dim) if y.size else y


@aten("_softmax_backward_data.default")
def _(g, out, dim, input_dtype):
    g, y = wide(g), wide(out)
    product = g * y
    return narrow_to(product - y * sum_kept(product, dim), input_dtype)


@aten("_log_softmax_backward_data.default")
def _(g, out, dim, input_dtype):
    g, y = wide(g), wide(out)
    return narrow_to(g - e.exp(y) * sum_kept(g, dim), input_dtype)


def sum_kept(x: Tensor, dim: int) -> Tensor:
    """The sum along an axis, which is kept."""
    return r.sum(x, axis=dim, keepdims=True) if x.ndim else x


@aten("cummax.default")
def _(x, dim):
    return _running_extremum(x, dim, cummax)


@aten("cummin.default")
def _(x, dim):
    return _running_extremum(x, dim, cummin)


def _running_extremum(x: Tensor, dim: int, scan: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """The running extremes and the last place of each among the elements up to it."""
    if not x.ndim or not x.size:
        return x, zeros(x.shape, int64)
    axis = dim % x.ndim
    values = scan(x, axis=axis)
    reached = e.equal(x, values)
    if x.dtype.is_float:
        reached = e.bitwise_or(reached, isnan(x))
    places = e.where(reached, iota(shape=x.shape, axis=axis, dtype=int32), 0)
    return values, cast(cummax(places, axis=axis), dtype=int64)
