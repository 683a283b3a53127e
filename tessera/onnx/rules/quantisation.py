"""Quantisation: QuantizeLinear, DequantizeLinear and the integer products."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from tessera.core.types import DType, f32, int32
from tessera.ir.tensor import Tensor
from tessera.onnx.element_types import CARRIERS, ELEMENTS, Carried, element_type
from tessera.onnx.node_rules import NodeCall, rule
from tessera.onnx.rules.conversion import convert_value
from tessera.onnx.rules.convolution import convolve
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.rearrange import narrow, repeat
from tessera.ops.tensor.shape import reshape

T = ir.DataType
RANGES = {
    T.INT2: (-2, 1), T.UINT2: (0, 3), T.INT4: (-8, 7), T.UINT4: (0, 15), T.INT8: (-128, 127), T.UINT8: (0, 255),
    T.INT16: (-32768, 32767), T.UINT16: (0, 65535), T.INT32: (-(2**31), 2**31 - 1),
}  # fmt: skip


def _spread(call: NodeCall, parameter: Tensor, x: Any) -> Tensor:
    """A scale or zero point as it broadcasts to `x`: one number, one for each index of an axis, or one for a block."""
    if math.prod(parameter.shape) == 1 and parameter.ndim <= 1:
        return reshape(parameter, shape=())
    rank = len(x.shape)
    axis = call.attr("axis", 1) % rank
    block = call.attr("block_size", 0)
    if block:
        return narrow(repeat(parameter, block, axis), axis, 0, x.shape[axis])
    if parameter.ndim != 1 or parameter.shape[0] != x.shape[axis]:
        raise call.fail("the scale does not fit the axis", expected=x.shape[axis], received=tuple(parameter.shape))
    return reshape(parameter, shape=tuple(-1 if i == axis else 1 for i in range(rank)))


def _unwrap(x: Any) -> Tensor:
    return x.tensor if isinstance(x, Carried) else x


@rule("QuantizeLinear", carried=True)
def _(call: NodeCall, x: Tensor, scale: Tensor, zero: Any = None) -> Any:
    wanted = call.attr("output_dtype", 0)
    element = ir.DataType(wanted) if wanted else T.UINT8 if zero is None else element_type(zero)
    return quantise(
        call, x, _spread(call, scale, x), None if zero is None else _spread(call, _unwrap(zero), x), element
    )


def quantise(call: NodeCall, x: Tensor, scale: Tensor, zero: Tensor | None, element: ir.DataType) -> Any:
    """round(x / scale) + zero, limited to the element type; to narrow floats x / scale + zero, rounded once."""
    precision = call.attr("precision", 0)
    wide = ELEMENTS[ir.DataType(precision)] if precision else f32
    if not x.dtype.is_float or wide.bits < 32 or scale.dtype.bits > 32:
        wide = scale.dtype if scale.dtype.bits > 32 else wide
    part = cast(x, dtype=wide) / cast(scale, dtype=wide)
    if element not in RANGES:
        moved = part if zero is None else part + cast(zero, dtype=wide)
        return convert_value(call, moved, element, bool(call.attr("saturate", 1)))
    whole = e.round(part)
    whole = whole if zero is None else whole + cast(zero, dtype=wide)
    low, high = RANGES[element]
    limited = e.minimum(e.maximum(whole, float(low)), float(high))
    dtype = CARRIERS.get(element) or ELEMENTS[element]
    found = cast(limited, dtype=dtype)
    return Carried(found, element) if element in CARRIERS else found


@rule("DequantizeLinear", carried=True)
def _(call: NodeCall, x: Any, scale: Any, zero: Any = None) -> Tensor:
    wanted = call.attr("output_dtype", 0)
    scale = _unwrap(scale)
    dtype = ELEMENTS[ir.DataType(wanted)] if wanted else scale.dtype
    return dequantise(call, _unwrap(x), scale, None if zero is None else _unwrap(zero), dtype)


def dequantise(call: NodeCall, x: Tensor, scale: Tensor, zero: Tensor | None, dtype: DType) -> Tensor:
    """(x - zero) · scale, computed in at least f32 and rounded once."""
    part = cast(x, dtype=int32) if x.dtype.is_integer else cast(x, dtype=f32)
    if zero is not None:
        part = part - cast(_spread(call, zero, x), dtype=part.dtype)
    factor = cast(_spread(call, scale, x), dtype=f32)
    return cast(cast(part, dtype=f32) * factor, dtype=dtype)


@rule("DynamicQuantizeLinear")
def _(call: NodeCall, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = e.minimum(r.min(x), 0.0), e.maximum(r.max(x), 0.0)
    scale = (high - low) / 255.0
    zero = e.round(e.minimum(e.maximum(-low / e.where(e.equal(scale, 0.0), 1.0, scale), 0.0), 255.0))
    found = e.minimum(e.maximum(e.round(x / e.where(e.equal(scale, 0.0), 1.0, scale)) + zero, 0.0), 255.0)
    unsigned = ELEMENTS[T.UINT8]
    return cast(found, dtype=unsigned), scale, cast(zero, dtype=unsigned)


def _integers(x: Tensor, zero: Tensor | None, shape: tuple[int, ...] | None = None) -> Tensor:
    """Integer operands as int32, with their zero point subtracted; `shape` is that of a zero point for each row."""
    wide = cast(x, dtype=int32)
    if zero is None:
        return wide
    moved = cast(zero, dtype=int32)
    if math.prod(zero.shape) == 1:
        return wide - reshape(moved, shape=())
    return wide - (moved if shape is None else reshape(moved, shape=shape))


@rule("MatMulInteger")
def _(call: NodeCall, a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None) -> Tensor:
    rows = None if a_zero is None or a_zero.ndim != 1 else (-1, 1)
    return matmul(_integers(a, a_zero, rows), _integers(b, b_zero), dtype=int32)


@rule("QLinearMatMul")
def _(
    call: NodeCall, a: Tensor, a_scale: Tensor, a_zero: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor,
    y_scale: Tensor, y_zero: Tensor,
) -> Any:  # fmt: skip
    rows = (-1, 1) if a_zero.ndim == 1 else None
    product = matmul(_integers(a, a_zero, rows), _integers(b, b_zero), dtype=int32)
    scales = [cast(s, dtype=f32) for s in (a_scale, b_scale, y_scale)]
    left = reshape(scales[0], shape=(-1, 1)) if scales[0].ndim == 1 and scales[0].shape[0] > 1 else scales[0]
    return _requantise(product, left * scales[1], scales[2], y_zero)


def _requantise(product: Tensor, factor: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """A product of integers, times `factor`, quantised again."""
    low, high = RANGES[element_type(zero)]
    part = e.round(cast(product, dtype=f32) * (factor / scale)) + cast(zero, dtype=f32)
    return cast(e.minimum(e.maximum(part, float(low)), float(high)), dtype=zero.dtype)


@rule("QLinearConv")
def _(
    call: NodeCall, x: Tensor, x_scale: Tensor, x_zero: Tensor, w: Tensor, w_scale: Tensor, w_zero: Tensor,
    y_scale: Tensor, y_zero: Tensor, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    per_channel = (-1, *(1,) * (w.ndim - 1))
    out = convolve(call, _integers(x, x_zero), _integers(w, w_zero, per_channel), bias)
    scale = reshape(w_scale, shape=per_channel[:-1]) if math.prod(w_scale.shape) > 1 else reshape(w_scale, shape=())
    return _requantise(out, reshape(x_scale, shape=()) * scale, reshape(y_scale, shape=()), reshape(y_zero, shape=()))
