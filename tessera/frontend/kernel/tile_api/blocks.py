"""Blocks of values: creation, pointwise functions, rearrangement, reductions, and rounding modes."""

from __future__ import annotations

from typing import Any

import ml_dtypes

from tessera.core.errors import ArgumentError, ShapeError
from tessera.core.types import DType, as_dtype, f32, f64, find_policy, int64
from tessera.frontend.kernel import memref
from tessera.frontend.kernel.trace import as_value, current_trace, is_number
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce
from tessera.ops.tensor import scalar_functions as f
from tessera.ops.tensor import shape as shapes
from tessera.ops.tensor.basic import broadcast_to
from tessera.ops.tensor.basic import cast as cast_
from tessera.ops.tensor.basic import cast as cast_op
from tessera.ops.tensor.basic import full as full_op

# Conversions with a rounding of one's choice, made of ops that every target has.


ROUNDING_MODES = ("rte", "rtz")


def wider_dtype(to: DType) -> DType:
    """The type in which to compute what is then rounded to `to` once.

    Raises:
        ArgumentError: there is none.
    """
    if to in (f64, int64):
        raise ArgumentError(f"nothing is wider than {to} to round it from", expected="a narrower type, or rte")
    return f64 if to is f32 else f32 if to.is_float else int64


def round_to_dtype(x: Tensor, to: DType, rounding: str = "rte", saturate: bool = False) -> Tensor:
    """`x` converted to `to`: to the nearest, ties to even ("rte"), or toward zero ("rtz").

    With `saturate` what lies beyond the range, infinities too, becomes the largest number; NaN stays NaN. Toward
    zero, finite numbers beyond the range become it in any case. Integers are clipped, else they wrap.

    Raises:
        ArgumentError: there is no such rounding, or none from this type.
    """
    if rounding not in ROUNDING_MODES:
        raise ArgumentError(f'"{rounding}" is not a rounding of this language', expected=" or ".join(ROUNDING_MODES))
    if not to.is_float:
        return cast_(_saturate(x, to) if saturate else x, dtype=to)
    held = x if x.dtype == wider_dtype(to) or rounding == "rte" else cast_(x, dtype=wider_dtype(to))
    low = _saturate(held, to)
    if rounding == "rte":
        return cast_(low if saturate else held, dtype=to)
    found = _truncate_to_dtype(low, to)
    return found if saturate else e.where(f.isinf(held), cast_(held, dtype=to), found)


def _saturate(x: Tensor, to: DType) -> Tensor:
    info: Any = ml_dtypes.finfo(to.numpy) if to.is_float else ml_dtypes.iinfo(to.numpy)
    low, high = (float(info.min), float(info.max)) if to.is_float else (int(info.min), int(info.max))
    if not to.is_float and x.dtype.is_integer and x.dtype.bits <= to.bits:
        return x
    return e.minimum(e.maximum(x, low), high)


def _truncate_to_dtype(x: Tensor, to: DType) -> Tensor:
    """`x`, within the range of `to`, rounded toward zero: where the nearest is too large, the one below it."""
    info: Any = ml_dtypes.finfo(to.numpy)
    near = cast_(x, dtype=to)
    back = cast_(near, dtype=x.dtype)
    # 1.25 · 2^-p of a number with p bits is more than half and less than one and a half of its last place;
    # among denormals the last place is the same for all.
    step = e.maximum(e.abs(back) * (1.25 * float(info.eps) / 2), 0.75 * float(info.smallest_subnormal))
    below = cast_(back - e.where(e.less(back, 0.0), -step, step), dtype=to)
    return e.where(e.greater(e.abs(back), e.abs(x)), below, near)


def full(shape: Any, value: Any, dtype: Any = f32) -> Tensor:
    """A block with every element `value`."""
    current_trace("tile.full")
    return full_op(shape=shape, value=value, dtype=as_dtype(dtype))


def zeros(shape: Any, dtype: Any = f32) -> Tensor:
    """A block of zeros."""
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = f32) -> Tensor:
    """A block of ones."""
    return full(shape, 1, dtype)


def arange(start: Any, stop: Any = None, dtype: Any = int64) -> Tensor:
    """`start`, `start + 1`, … before `stop`; with one argument, from 0. Their difference is a constant."""
    current_trace("tile.arange")
    low, high = (0, start) if stop is None else (start, stop)
    size = memref.constant_difference(high, low)
    if size is None or size < 0:
        raise ShapeError(
            "the length of this block is not known while compiling", expected="stop - start is a constant",
            suggestion="tile.arange(0, BLOCK) + start",
        )  # fmt: skip
    ramp = shapes.iota(shape=(size,), dtype=as_dtype(dtype))
    return ramp if isinstance(low, int) and low == 0 else ramp + low


def cast(x: Any, dtype: Any, rounding: str = "rte", saturate: bool = False) -> Tensor:
    """`x` with elements converted to `dtype`: to the nearest, ties to even ("rte"), or toward zero ("rtz").

    With `saturate` what lies beyond the range becomes the largest number. A policy (`ts.bf16 @ ts.toward_zero`) in
    place of an element type says itself how its numbers are rounded, here and in what is computed with the result.

    Raises:
        ArgumentError: there is no such rounding, or none from this type.
    """
    if rounding == "rte" and not saturate:
        return full((), x, dtype) if is_number(x) else cast_op(x, dtype=find_policy(dtype) or as_dtype(dtype))
    return round_to_dtype(as_value(x), as_dtype(dtype), rounding, saturate)


def transpose(x: Any, dim0: int = -2, dim1: int = -1) -> Tensor:
    """`x` with two axes exchanged."""
    return shapes.transpose(x, dim0, dim1)


def broadcast(x: Any, shape: Any) -> Tensor:
    """`x` repeated along axes of size 1 and new leading axes until it has `shape`."""
    return broadcast_to(x, shape=tuple(shape))


def reshape(x: Any, shape: Any) -> Tensor:
    """The same elements in row-major order with another shape."""
    return shapes.reshape(x, shape=shape)


def max(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The largest element along `axis`."""
    return reduce.max(x, axis=axis, keepdims=keepdims)


def min(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """The smallest element along `axis`."""
    return reduce.min(x, axis=axis, keepdims=keepdims)


def abs(x: Any) -> Tensor:
    """The magnitude of each element."""
    return e.abs(x)
