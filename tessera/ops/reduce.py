"""Reductions along axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.errors import DTypeError, ShapeError
from tessera.numerics import bounds, rows, sums
from tessera.op import ACCUMULATE, REGISTRY, STORAGE, Op, error, lower, op
from tessera.ops import shape
from tessera.ops.basic import cast, check_count, plain
from tessera.shapes import Size, normalize_axes, normalize_axis
from tessera.tensor import as_tensor, bind
from tessera.types import DType, TensorType, f32, int64

Axes = tuple[int, ...]


def reduced(x: TensorType, axis: Axes, keepdims: bool) -> tuple[Size, ...]:
    """The shape left after reducing over `axis` (negative)."""
    sizes = [(1 if keepdims else None) if i - x.rank in axis else s for i, s in enumerate(x.shape)]
    return tuple(s for s in sizes if s is not None)


def _axes(x: TensorType, *, axis: Any, keepdims: bool) -> dict[str, Any]:
    return {"axis": normalize_axes(axis, x.rank), "keepdims": bool(keepdims)}


def _total(dtype: DType) -> DType:
    """Sums of narrow integers give int64 (design 4)."""
    return int64 if dtype.kind == "bool" or (dtype.is_integer and dtype.bits < 64) else dtype


def _sum_type(x: TensorType, *, axis: Axes, keepdims: bool) -> TensorType:
    return x.with_shape(reduced(x, axis, keepdims)).with_dtype(_total(x.dtype))


def _extreme_type(x: TensorType, *, axis: Axes, keepdims: bool) -> TensorType:
    empty = [a for a in axis if x.shape[a] == 0]
    if empty:
        raise ShapeError(f"reducing axis {empty[0]} of size 0 has no value", received=str(x))
    return x.with_shape(reduced(x, axis, keepdims))


def summing(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `plain`, but by compensated sums where the operand's policy asks for them."""
    check_count(op, operands)
    x = as_tensor(operands[0])
    if not (x.type.policy and x.type.policy.compensated and x.dtype.is_float):
        return bind(op, [x], attrs)
    total = REGISTRY["ts.compensated_sum"]
    if op is sum:
        return bind(total, [x], attrs)
    wide = cast(x, dtype=x.type.accumulate) if x.dtype != x.type.accumulate else x
    found = bind(total, [wide], attrs)
    scaled = found * (int(found.size) / int(x.size))  # one over the number of elements in each sum
    return scaled if scaled.dtype == x.dtype else cast(scaled, dtype=x.type.policy)


@op(infer=_sum_type, coerce=summing, canonical=_axes, numerics=ACCUMULATE)
def sum(x, *, axis: Any = None, keepdims: bool = False):
    """The sum of the elements along `axis` (all axes when None); narrower integers and bools give int64."""
    if x.dtype.kind in "iub":
        return np.sum(x, axis=axis, keepdims=keepdims, dtype=np.int64)
    return rows.total(x, axis, keepdims)


error(sum)(sums.total)


@op(infer=_extreme_type, coerce=plain, canonical=_axes, numerics=STORAGE)
def max(x, *, axis: Any = None, keepdims: bool = False):
    """The largest element along `axis`; NaN if any is. Reducing nothing is an error."""
    return rows.extreme(np.maximum, x, axis, keepdims)


@op(infer=_extreme_type, coerce=plain, canonical=_axes, numerics=STORAGE)
def min(x, *, axis: Any = None, keepdims: bool = False):
    """The smallest element along `axis`; NaN if any is. Reducing nothing is an error."""
    return rows.extreme(np.minimum, x, axis, keepdims)


error(max, min)(bounds.selection)


def searching(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `plain`; without an axis, the place in the flattened tensor."""
    check_count(op, operands)
    x = as_tensor(operands[0])
    if attrs["axis"] is not None or not x.ndim:
        return bind(op, [x], {**attrs, "axis": -1 if attrs["axis"] is None else attrs["axis"]})
    place = bind(op, [shape.reshape(x, shape=(-1,))], {"axis": 0, "keepdims": False})
    return shape.reshape(place, shape=(1,) * x.ndim) if attrs["keepdims"] else place


def _one_axis(x: TensorType, *, axis: int, keepdims: bool) -> dict[str, Any]:
    if x.rank == 0:
        raise ShapeError("argmax needs an axis to search along; the tensor is a scalar")
    return {"axis": normalize_axis(axis, x.rank), "keepdims": bool(keepdims)}


def _place_type(x: TensorType, *, axis: int, keepdims: bool) -> TensorType:
    return _extreme_type(x, axis=(axis,), keepdims=keepdims).with_dtype(int64)


@op(infer=_place_type, coerce=searching, canonical=_one_axis, numerics=STORAGE)
def argmax(x, *, axis: int | None = None, keepdims: bool = False):
    """Where along `axis` (None: of them all) the largest element is (int64): the first of equals, of NaNs."""
    return np.argmax(x, axis=axis, keepdims=keepdims)


error(argmax)(sums.contest(1))


@op(infer=_place_type, coerce=searching, canonical=_one_axis, numerics=STORAGE)
def argmin(x, *, axis: int | None = None, keepdims: bool = False):
    """Where along `axis` (None: of them all) the least element is (int64): the first of equals, of NaNs."""
    return np.argmin(x, axis=axis, keepdims=keepdims)


error(argmin)(sums.contest(-1))


def _mean_type(x: TensorType, *, axis: Axes, keepdims: bool) -> TensorType:
    if x.dtype.kind == "bool":
        raise DTypeError("the mean of bools", suggestion="cast to ts.f32 first")
    return _extreme_type(x, axis=axis, keepdims=keepdims).with_dtype(x.dtype if x.dtype.is_float else f32)


@op(infer=_mean_type, coerce=summing, canonical=_axes, numerics=ACCUMULATE)
def mean(x, *, axis: Any = None, keepdims: bool = False):
    """The arithmetic mean along `axis`; integers give f32."""
    return np.mean(x, axis=axis, keepdims=keepdims, dtype=np.float64 if x.dtype.kind in "iu" else x.dtype)


@lower(mean)
def _(x, *, axis, keepdims):
    count = int(np.prod([x.shape[a] for a in axis], dtype=np.int64))
    wide = x if x.dtype.is_float else cast(x, dtype=f32)
    return sum(wide, axis=axis, keepdims=keepdims) * (1.0 / count)


def share(count: float) -> float:
    """One part of `count`: what a sum is multiplied by for a mean; infinite where there is nothing to divide by."""
    return 1.0 / count if count > 0 else math.inf


@op(coerce=plain, canonical=lambda x, *, correction, **a: {"correction": float(correction), **_axes(x, **a)})
def var(x, *, axis: Any = None, keepdims: bool = False, correction: float = 0.0):
    """The variance along `axis`: the mean square distance from the mean, with n - `correction` below.

    Where that leaves nothing to divide by it is infinite, or NaN of equal elements.
    """
    count = math.prod(x.shape[a] for a in axis)
    return np.var(x, axis=axis, keepdims=keepdims) * x.dtype.type(count * share(count - correction))


@lower(var)
def _(x, *, axis, keepdims, correction):
    count = int(np.prod([x.shape[a] for a in axis], dtype=np.int64))
    distance = x - mean(x, axis=axis, keepdims=True)
    return sum(distance * distance, axis=axis, keepdims=keepdims) * share(count - correction)
