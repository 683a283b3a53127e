"""Special rows: special functions, medians, index tables and draws of integers, and what copies a view (ATen)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.core.types import DType, TensorType, int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import random as draws
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor import special_functions as f
from tessera.ops.tensor.basic import broadcast_to, cast, splat
from tessera.ops.tensor.rearrange import take_along_axis
from tessera.ops.tensor.scalar_functions import isnan, log1p
from tessera.ops.tensor.scatter import scatter, scatter_add
from tessera.ops.tensor.shape import iota, reshape, stack
from tessera.torch.rows.reductions import axes_of, norm_of, order_along
from tessera.torch.rows.shapes import slice_axis
from tessera.torch.table import ATEN, aten, floating, narrow_to, promote, unify_floating, wide, zeros

# Special functions.

FUNCTIONS = {
    "digamma": f.digamma, "erfinv": f.erfinv, "lgamma": f.lgamma, "special_i0e": f.bessel_i0e,
    "special_i1e": f.bessel_i1e, "i0": lambda x: f.bessel_i0e(x) * e.exp(e.abs(x)),
    "special_i1": lambda x: f.bessel_i1e(x) * e.exp(e.abs(x)),
}  # fmt: skip

for _name, _function in FUNCTIONS.items():
    aten(f"{_name}.default")(lambda x, f=_function: narrow_to(f(wide(floating(x))), floating(x).dtype))


@aten("angle.default")
def _(x):
    y = wide(floating(x))
    return narrow_to(e.where(isnan(y), y, e.where(e.less(y, 0.0), math.pi, 0.0)), floating(x).dtype)


@aten("ldexp.Tensor")
def _(x, exponent):
    a, b = unify_floating(x, exponent)
    return narrow_to(wide(a) * e.exp2(wide(b)), a.dtype)


@aten("logcumsumexp.default")
def _(x, dim):
    # In log2(n) steps, each adds the sum of a span to that of the span before it.
    if not x.ndim or not x.size:
        return x
    axis, total, reach = dim % x.ndim, wide(x), 1
    here = iota(shape=x.shape, axis=axis)
    while reach < x.shape[axis]:
        before = take_along_axis(total, e.maximum(here - reach, 0), axis)
        total, reach = e.where(e.less(here, reach), total, _add_logs(total, before)), reach * 2
    return narrow_to(total, x.dtype)


def _add_logs(x: Tensor, y: Tensor) -> Tensor:
    most, least = e.maximum(x, y), e.minimum(x, y)
    same = e.equal(most, least)  # of infinities too, whose difference is NaN
    return e.where(same, most + math.log(2), most + log1p(e.exp(least - e.where(same, least, most))))


@aten("dist.default")
def _(x, y, p=2):
    return narrow_to(norm_of(e.abs(wide(x) - wide(y)), p, None, False), promote(x, y))


# Order.


@aten("kthvalue.default")
def _(x, k, dim=-1, keepdim=False):
    return _pick(x, k - 1, dim, keepdim)


def _pick(x: Tensor, place: int, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The element at a place of the sorted order, and its index."""
    if not x.ndim:
        return x, zeros((), int64)
    axis = dim % x.ndim
    index = slice_axis(order_along(x, axis, False), axis, place, place + 1)
    found, shape = (take_along_axis(x, index, axis), index), x.shape[:axis] + x.shape[axis + 1 :]
    value, index = found if keepdim else [reshape(v, shape=shape) for v in found]
    return value, index


@aten("median.default")
def _(x):
    flat = reshape(x, shape=(-1,))
    value = _pick(flat, (x.size - 1) // 2, 0, False)[0]
    return e.where(r.any(isnan(flat)), math.nan, value) if x.dtype.is_float else value


# Indices, and draws.


@aten("tril_indices.default")
def _(row, col, offset=0, dtype=None):
    return _list_indices(np.tril_indices(row, offset, col), dtype)


@aten("triu_indices.default")
def _(row, col, offset=0, dtype=None):
    return _list_indices(np.triu_indices(row, offset, col), dtype)


def _list_indices(pair: Any, dtype: DType | None) -> Tensor:
    return cast(Tensor(np.stack(pair).astype(np.int64)), dtype=dtype or int64)


@aten("randint.default")
def _(high, size, dtype=None):
    return cast(draws.randint(0, high, tuple(size)), dtype=dtype or int64)


@aten("randint.low")
def _(low, high, size, dtype=None):
    return cast(draws.randint(low, high, tuple(size)), dtype=dtype or int64)


@aten("randint_like.default")
def _(x, high, dtype=None):
    return cast(draws.randint(0, high, x.shape), dtype=dtype or x.dtype)


@aten("randint_like.low_dtype")
def _(x, low, high, dtype=None):
    return cast(draws.randint(low, high, x.shape), dtype=dtype or x.dtype)


@aten("put.default")
def _(x, index, source, accumulate=False):
    flat, at = reshape(x, shape=(-1,)), reshape(index, shape=(-1,))
    put = scatter_add if accumulate else scatter
    return reshape(put(flat, at, reshape(source, shape=(-1,)), axis=0), shape=x.shape) if index.size else x


@aten("masked_scatter_backward.default")
def _(g, mask, sizes):
    count = math.prod(sizes)
    hit = reshape(broadcast_to(mask, shape=g.shape), shape=(-1,))
    number = r.cumsum(cast(hit, dtype=int64), axis=0) - 1
    at = e.where(e.bitwise_and(hit, e.less(number, count)), number, count)
    found = scatter_add(zeros((count + 1,), g.dtype), at, reshape(g, shape=(-1,)), axis=0)
    return reshape(slice_axis(found, 0, 0, count), shape=tuple(sizes))


@aten("nonzero_static.default")
def _(x, size, fill_value=-1):
    if not x.ndim or not size:
        return splat(fill_value, TensorType((size, x.ndim), int64))
    hit = reshape(e.not_equal(x, 0), shape=(-1,))
    number = r.cumsum(cast(hit, dtype=int64), axis=0) - 1
    at = e.where(e.bitwise_and(hit, e.less(number, size)), number, size)  # those left out share the last place
    columns = [reshape(iota(shape=x.shape, axis=axis), shape=(-1,)) for axis in range(x.ndim)]
    blank = splat(fill_value, TensorType((size + 1,), int64))
    return stack([slice_axis(scatter(blank, at, column, axis=0), 0, 0, size) for column in columns], axis=1)


@aten("count_nonzero.default", "count_nonzero.dim_IntList")
def _(x, dim=None):
    return r.sum(cast(e.not_equal(x, 0), dtype=int64), axis=axes_of(x, dim)) if x.ndim else cast(x != 0, dtype=int64)


# Copies of views.

for _name in ("narrow", "permute"):
    aten(f"{_name}_copy.default")(ATEN[f"aten.{_name}.default"])
aten("unbind_copy.int")(ATEN["aten.unbind.int"])
aten("lift_fresh.default")(lambda x: x)
aten("atleast_1d.default")(lambda x: x if x.ndim else reshape(x, shape=(1,)))
aten("atleast_2d.default")(lambda x: x if x.ndim > 1 else reshape(x, shape=(1, x.size)))
