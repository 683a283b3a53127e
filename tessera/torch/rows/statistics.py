"""Statistics rows: medians, modes, histograms, draws of categories, and common divisors (ATen)."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.shapes import broadcast
from tessera.core.types import DType, f32, int16, int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import random as draws
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor.basic import broadcast_to, cast, splat
from tessera.ops.tensor.rearrange import take_along_axis
from tessera.ops.tensor.scalar_functions import isnan
from tessera.ops.tensor.scatter import scatter_add
from tessera.ops.tensor.shape import iota, reshape
from tessera.torch.rows.indexing import search
from tessera.torch.rows.reductions import order_along, sort_along
from tessera.torch.rows.shapes import slice_axis
from tessera.torch.table import ATEN, aten, unify, wide, zeros
from tessera.transforms.flow import while_loop

# Medians and modes: an element and its index. Of equal elements each may be named; here it is the last one of a mode,
# as PyTorch names it on the CPU, and the first one of a median.


@aten("median.dim")
def _(x, dim, keepdim=False):
    return _middle(x, dim, keepdim, skip=False)


@aten("nanmedian.dim")
def _(x, dim, keepdim=False):
    return _middle(x, dim, keepdim, skip=True)


@aten("nanmedian.default")
def _(x):
    if not x.size:
        return splat(math.nan if x.dtype.is_float else 0, x.type.with_shape(()))
    return _middle(reshape(x, shape=(-1,)), 0, False, skip=True)[0]


def _middle(x: Tensor, dim: int, keepdim: bool, skip: bool) -> tuple[Tensor, Tensor]:
    """The lower median along an axis: of the numbers where NaN is skipped, else the first NaN if there is one."""
    if not x.ndim:
        return x, zeros((), int64)
    axis, last = dim % x.ndim, x.shape[dim % x.ndim] - 1
    order = order_along(x, axis, False)
    if skip and x.dtype.is_float:
        numbers = r.sum(cast(e.equal(x, x), dtype=int64), axis=axis, keepdims=True)
        return _take(x, take_along_axis(order, e.floor_divide(e.maximum(numbers - 1, 0), 2), axis), axis, keepdim)
    index = slice_axis(order, axis, last // 2, last // 2 + 1)
    if x.dtype.is_float:
        unknown = isnan(x)
        first = cast(r.argmax(unknown, axis=axis, keepdims=True), dtype=int64)
        index = e.where(r.any(unknown, axis=axis, keepdims=True), first, index)
    return _take(x, index, axis, keepdim)


def _take(x: Tensor, index: Tensor, axis: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The element at an index along an axis, and the index."""
    value = take_along_axis(x, index, axis)
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    return (value, index) if keepdim else (reshape(value, shape=shape), reshape(index, shape=shape))


@aten("mode.default")
def _(x, dim=-1, keepdim=False):
    if not x.ndim:
        return x, zeros((), int64)
    axis = dim % x.ndim
    ordered, order = sort_along(x, axis, False)
    here = iota(shape=x.shape, axis=axis)
    before = take_along_axis(ordered, e.maximum(here - 1, 0), axis)
    starts = e.bitwise_or(e.equal(here, 0), e.not_equal(ordered, before))
    first = ATEN["aten.cummax.default"](e.where(starts, here, 0), axis)[0]
    place = cast(r.argmax(here - first, axis=axis, keepdims=True), dtype=int64)
    return _take(x, take_along_axis(order, place, axis), axis, keepdim)


# Histograms.


@aten("histc.default")
def _(x, bins=100, min=0, max=0):
    flat = wide(reshape(x, shape=(-1,)))
    low, high = _find_range(flat, float(min), float(max))
    inside = e.bitwise_and(e.greater_equal(flat, low), e.less_equal(flat, high))
    at = e.floor((e.where(inside, flat, low) - low) / (high - low) * float(bins))
    narrow = int16 if bins < 1 << 15 else int64
    at = e.where(inside, e.minimum(cast(at, dtype=narrow), bins - 1), bins)  # those outside share a bin of their own
    counts = scatter_add(zeros((bins + 1,), int64), at, splat(1, at.type.with_dtype(int64)), axis=0)
    return cast(slice_axis(counts, 0, 0, bins), dtype=x.dtype)


def _find_range(x: Tensor, low: float, high: float) -> tuple[Any, Any]:
    """The range of a histogram, or that of the elements where it is empty; one wider on both sides if that is too."""
    kind = x.type.with_shape(())
    if low != high or not x.size:
        apart = float(low == high)
        return splat(low - apart, kind), splat(high + apart, kind)
    least, most = r.min(x), r.max(x)
    apart = cast(e.equal(least, most), dtype=x.dtype)
    return least - apart, most + apart


# Draws: by Tessera's generator. A category without weight is never drawn.


@aten("multinomial.default")
def _(x, num_samples, replacement=False):
    weights = cast(x, dtype=f32)
    if not replacement:
        noise = -e.log(-e.log(e.maximum(draws.rand(x.shape, dtype=f32), 2.0**-24)))
        keys = e.where(e.greater(weights, 0.0), e.log(weights) + noise, -math.inf)
        return slice_axis(order_along(keys, -1, True), x.ndim - 1, 0, num_samples)
    sums = r.cumsum(weights, axis=-1)
    total = slice_axis(sums, x.ndim - 1, x.shape[-1] - 1, x.shape[-1])
    points = draws.rand((*x.shape[:-1], num_samples), dtype=f32) * total
    last = r.max(e.where(e.greater(weights, 0.0), iota(shape=x.shape, axis=x.ndim - 1), 0), axis=-1, keepdims=True)
    return e.minimum(search(sums, points, False, True), last)


# Searches for a number, and repetition.


@aten("searchsorted.Scalar")
def _(row, x, out_int32=False, right=False, side=None, sorter=None):
    row = row if sorter is None else take_along_axis(row, sorter, -1)
    return _search_number(row, x, out_int32, right or side == "right")


@aten("bucketize.Scalar")
def _(x, boundaries, out_int32=False, right=False):
    return _search_number(boundaries, x, out_int32, right)


def _search_number(row: Tensor, x: Any, out_int32: bool, right: bool) -> Tensor:
    kind: DType = int64 if isinstance(x, int) else f32
    return reshape(search(row, splat(x, zeros((1,), kind).type), out_int32, right), shape=())


@aten("repeat_interleave.Tensor")
def _(repeats, output_size=None):
    return search(r.cumsum(cast(repeats, dtype=int64), axis=0), iota(shape=(output_size,)), False, True)


# Common divisors, by Euclid's algorithm.


@aten("gcd.default")
def _(x, y):
    x, y = unify(x, y)
    return _find_divisor(x, y)


@aten("lcm.default")
def _(x, y):
    x, y = unify(x, y)
    divisor = _find_divisor(x, y)
    return e.where(e.equal(divisor, 0), 0, _magnitude(e.floor_divide(x, e.where(e.equal(divisor, 0), 1, divisor)) * y))


def _find_divisor(x: Tensor, y: Tensor) -> Tensor:
    shape = broadcast(x.shape, y.shape)
    x, y = (_magnitude(broadcast_to(v, shape=shape)) for v in (x, y))
    if not x.size:
        return x
    found, _ = while_loop(lambda a, b: r.any(e.not_equal(b, 0)), _divide, (x, y))
    return found


def _divide(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    done = e.equal(b, 0)
    return e.where(done, a, b), e.where(done, 0, e.remainder(a, e.where(done, 1, b)))


def _magnitude(x: Tensor) -> Tensor:
    return x if x.dtype.kind == "uint" else e.abs(x)
