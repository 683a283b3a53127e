"""The ops every other family leans on: constants, casts and broadcasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.elements import fitting
from tessera.errors import ArgumentError, ShapeError, here
from tessera.numerics import bounds
from tessera.numerics.convert import convert
from tessera.op import STORAGE, Op, error, lower, op
from tessera.ops.arguments import shape_of
from tessera.shapes import Size, as_size, broadcast
from tessera.shapes.rules import show
from tessera.tensor import Tensor, as_tensor, bind
from tessera.types import DType, Policy, TensorType, as_dtype, f32, policy_of


def plain(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Bind with operands made tensors, and nothing else changed."""
    check_count(op, operands)
    return bind(op, [as_tensor(x) for x in operands], attrs)


def check_count(op: Op, operands: Sequence[Any]) -> None:
    """Refuse a call with operands missing."""
    if len(operands) != len(op.operands):
        raise ArgumentError(
            f"{op.__name__} takes {len(op.operands)} operands, not {len(operands)}", location=here(),
            expected=", ".join(op.operands) or "none",
        )  # fmt: skip


def _full_type(*, shape: tuple[Size, ...], value: Any, dtype: DType) -> TensorType:
    return TensorType(tuple(shape), dtype)


def _full_attrs(*, shape: Any, value: Any, dtype: Any) -> dict[str, Any]:
    element = as_dtype(dtype)
    value = fitting(value, element)
    try:
        number: Any = np.asarray(value).astype(element.numpy).item() if not element.is_float else float(value)
    except (TypeError, ValueError):
        raise ArgumentError("this is no number to fill with", expected="one number", received=repr(value)) from None
    return {"shape": shape_of(shape, as_size), "value": number, "dtype": element}


@op(infer=_full_type, coerce=plain, canonical=_full_attrs, numerics=STORAGE)
def full(*, shape: tuple, value: Any, dtype: DType = f32) -> Any:
    """A tensor of `shape` with every element `value`."""
    return np.broadcast_to(convert(np.asarray(value), dtype), shape)


error(full)(bounds.filled)


def _cast_type(x: TensorType, *, dtype: DType | Policy) -> TensorType:
    return TensorType(x.shape, dtype.storage, dtype) if isinstance(dtype, Policy) else x.with_dtype(dtype)


def _cast_attrs(x: TensorType, *, dtype: Any) -> dict[str, Any]:
    policy = policy_of(dtype)
    return {"dtype": policy if policy is not None and policy.clauses() else as_dtype(dtype)}


@op(
    infer=_cast_type,
    coerce=plain,
    canonical=_cast_attrs,
    numerics=STORAGE,
    pointwise=True,
)
def cast(x: Any, *, dtype: DType | Policy) -> Any:
    """`x` with elements converted to `dtype`: nearest-even; float to integer goes toward zero and saturates.

    A policy (`ts.bf16 @ ts.accum(ts.f32)`) becomes part of the result's type, and its rounding is that of the cast.
    """
    return x if isinstance(dtype, Policy) else convert(x, dtype)


error(cast)(bounds.converted)


def _broadcast_type(x: TensorType, *, shape: tuple[Size, ...]) -> TensorType:
    if broadcast(x.shape, shape) != tuple(shape):
        raise ShapeError(f"{show(x.shape)} does not broadcast to {show(shape)}")
    return x.with_shape(tuple(shape))


@op(
    infer=_broadcast_type,
    coerce=plain,
    canonical=lambda x, *, shape: {"shape": shape_of(shape, as_size)},
    numerics=STORAGE,
    name="broadcast",
)
def broadcast_to(x: Any, *, shape: tuple) -> Any:
    """`x` repeated along new leading axes and axes of size 1 until it has `shape`."""
    return np.broadcast_to(x, shape)


error(broadcast_to)(bounds.structural)


def splat(value: Any, type: TensorType) -> Tensor:
    """A Python number as a tensor of this type: recorded as `full`, never as a captured array."""
    return full(shape=type.shape, value=value, dtype=type.dtype)


@op(infer=lambda x: x, coerce=plain, numerics=STORAGE)
def stop_gradient(x):
    """`x`, of which derivatives take no notice."""
    return x


@lower(stop_gradient)
def _(x):
    return x
