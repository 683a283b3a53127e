"""Blocks of values: made, converted, rearranged and reduced."""

from __future__ import annotations

from typing import Any

from tessera.errors import ShapeError
from tessera.kernel import affine
from tessera.kernel.rounding import rounded
from tessera.kernel.trace import as_value, current, is_number
from tessera.ops import elementwise as e
from tessera.ops import functions as f
from tessera.ops import reduce
from tessera.ops import shape as shapes
from tessera.ops.basic import broadcast_to
from tessera.ops.basic import cast as cast_op
from tessera.ops.basic import full as full_op
from tessera.tensor import Tensor
from tessera.types import as_dtype, f32, int64, policy_of

exp, exp2, log, log2, sqrt, rsqrt = e.exp, e.exp2, e.log, e.log2, e.sqrt, e.rsqrt
tanh, erf, sin, cos, floor, ceil = e.tanh, e.erf, e.sin, e.cos, e.floor, e.ceil
expm1, log1p, log10, tan, sinh, cosh = f.expm1, f.log1p, f.log10, f.tan, f.sinh, f.cosh
atan, atan2, asin, acos = f.atan, f.atan2, f.asin, f.acos
sign, trunc, isnan, isinf, isfinite, fma, clip = f.sign, f.trunc, f.isnan, f.isinf, f.isfinite, f.fma, f.clip
round, pow = e.round, e.pow
where, maximum, minimum = e.where, e.maximum, e.minimum
sum, argmax, argmin = reduce.sum, reduce.argmax, reduce.argmin
_elementwise_abs = e.abs


def full(shape: Any, value: Any, dtype: Any = f32) -> Tensor:
    """A block with every element `value`."""
    current("tile.full")
    return full_op(shape=shape, value=value, dtype=as_dtype(dtype))


def zeros(shape: Any, dtype: Any = f32) -> Tensor:
    """A block of zeros."""
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = f32) -> Tensor:
    """A block of ones."""
    return full(shape, 1, dtype)


def arange(start: Any, stop: Any = None, dtype: Any = int64) -> Tensor:
    """`start`, `start + 1`, … before `stop`; with one argument, from 0. Their difference is a constant."""
    current("tile.arange")
    low, high = (0, start) if stop is None else (start, stop)
    size = affine.difference(high, low)
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
        return full((), x, dtype) if is_number(x) else cast_op(x, dtype=policy_of(dtype) or as_dtype(dtype))
    return rounded(as_value(x), as_dtype(dtype), rounding, saturate)


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
    return _elementwise_abs(x)
