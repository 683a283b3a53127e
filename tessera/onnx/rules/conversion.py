"""Conversions between element types: Cast, CastLike, BitCast; constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from tessera.core import types
from tessera.core.types import DType
from tessera.ir.tensor import Tensor
from tessera.onnx.element_types import (
    CARRIERS,
    Carried,
    array_to_value,
    element_type,
    find_element,
    value_to_array,
)
from tessera.onnx.node_rules import NodeCall, rule
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.bits import bitcast

T = ir.DataType
LARGEST = {types.fp8_e4m3: 448.0, types.fp8_e5m2: 57344.0}
WIDTHS = {T.UINT4: 4, T.UINT2: 2, T.INT2: 2}


@rule("Cast", carried=True)
def _(call: NodeCall, x: Any) -> Any:
    return convert_value(call, x, ir.DataType(call.attr("to")))


@rule("CastLike", carried=True)
def _(call: NodeCall, x: Any, like: Any) -> Any:
    return convert_value(call, x, element_type(like))


def convert_value(call: NodeCall, x: Any, element: ir.DataType, saturate: bool | None = None) -> Any:
    """A value converted to an ONNX element type: to integers toward zero, to floats to the nearest even."""
    if element_type(x) == element:
        return x
    if isinstance(x, np.ndarray) or element == T.STRING:
        return _convert_strings(call, x, element)
    saturate = bool(call.attr("saturate", 1)) if saturate is None else saturate
    if element in CARRIERS:
        return _to_carrier(call, x, element, saturate)
    tensor = x.tensor if isinstance(x, Carried) else x
    return convert_tensor(tensor, find_element(element, "Cast"), saturate)


def convert_tensor(x: Tensor, dtype: DType, saturate: bool = True) -> Tensor:
    """A tensor in another element type; to narrow floats values beyond the largest one saturate, or are not finite."""
    if x.dtype == dtype:
        return x
    if dtype.kind == "bool":
        return e.not_equal(x, 0)
    if saturate and dtype in LARGEST and x.dtype.is_float:
        most = LARGEST[dtype]
        wide = x if x.dtype.bits >= 16 else cast(x, dtype=types.f32)
        x = e.maximum(e.minimum(wide, most), -most)
    if dtype == types.int4:
        x = _wrap_bits(cast(x, dtype=types.int32), 4, signed=True)
    return cast(x, dtype=dtype)


def _wrap_bits(x: Tensor, bits: int, signed: bool) -> Tensor:
    """The lowest bits of int32 elements, as a number."""
    low = e.bitwise_and(x, (1 << bits) - 1)
    return e.where(e.greater_equal(low, 1 << (bits - 1)), low - (1 << bits), low) if signed else low


def _to_carrier(call: NodeCall, x: Any, element: ir.DataType, saturate: bool) -> Carried:
    tensor = x.tensor if isinstance(x, Carried) else x
    if element in WIDTHS:
        whole = cast(convert_tensor(tensor, types.int32), dtype=types.int32)
        return Carried(cast(_wrap_bits(whole, WIDTHS[element], element == T.INT2), dtype=CARRIERS[element]), element)
    if tensor.is_traced:
        raise call.refuse(f"conversion to {element.name} in a compiled model", "run the model without a target")
    if element == T.FLOAT8E8M0:
        powers = _round_to_power(tensor.numpy().astype(np.float32), call.attr("round_mode", "up"), saturate)
        return Carried(Tensor(powers), element)
    if saturate:
        most = _largest(element)
        tensor = e.maximum(e.minimum(cast(tensor, dtype=types.f32), most), -most)
    rounded = cast(tensor, dtype=types.f32).numpy().astype(element.numpy())
    return Carried(Tensor(rounded.astype(np.float32)), element)


def _round_to_power(x: np.ndarray, mode: str, saturate: bool) -> np.ndarray:
    """The size of each element as a power of two from 2^-127 to 2^127: the next above, below, or the nearest."""
    size = np.abs(x.astype(np.float64))
    with np.errstate(divide="ignore"):
        exponent = np.log2(size)
    low = np.floor(exponent)
    steps = {"up": np.ceil(exponent), "down": low, "nearest": low + (size >= 1.5 * np.exp2(low))}
    found = np.exp2(np.clip(steps[mode], -127, 127))
    beyond = ~np.isfinite(size) & ~(saturate & np.isinf(size)) | (~np.bool_(saturate) & (steps[mode] > 127))
    return np.where(beyond, np.nan, found).astype(np.float32)


def _largest(element: ir.DataType) -> float:
    import ml_dtypes

    return float(ml_dtypes.finfo(element.numpy()).max)


def _convert_strings(call: NodeCall, x: Any, element: ir.DataType) -> Any:
    if element != T.STRING:
        numbers = [_parse_number(str(s)) for s in np.asarray(x).reshape(-1)]
        array = np.array(numbers, np.float64).reshape(np.shape(x))
        return convert_value(call, Tensor(array), element)
    array = value_to_array(x)
    wide = array if array.dtype.isbuiltin == 1 else array.astype(np.float32)
    return np.array([_format_number(n) for n in wide.reshape(-1)], object).reshape(wide.shape)


def _parse_number(text: str) -> float:
    return float(text.strip())


def _format_number(number: Any) -> str:
    if isinstance(number, (np.floating, float)):
        whole = float(number)
        return {"inf": "INF", "-inf": "-INF", "nan": "NaN"}.get(str(whole), str(number))
    return str(int(number)) if not isinstance(number, (bool, np.bool_)) else str(bool(number))


@rule("BitCast", carried=True)
def _(call: NodeCall, x: Any) -> Any:
    wanted = ir.DataType(call.attr("to"))
    if isinstance(x, Tensor) and x.is_traced:
        if "bool" in (x.dtype.kind, find_element(wanted, "BitCast").kind):
            raise call.refuse("the bits of truth values in a compiled model", "run the model without a target")
        return bitcast(x, find_element(wanted, "BitCast"))
    if wanted == T.STRING or isinstance(x, np.ndarray):
        raise call.refuse("strings have no bits to reinterpret")
    array = value_to_array(x)
    if array.dtype.itemsize != wanted.numpy().itemsize:
        raise call.fail("the elements have another width", expected=wanted.name, received=str(array.dtype))
    held = np.ascontiguousarray(array).view(wanted.numpy()).reshape(array.shape)
    return array_to_value(held, "BitCast")


@rule("Constant")
def _(call: NodeCall) -> Any:
    for name, value in call.attributes.items():
        if name == "value":
            return value
        if name in ("value_float", "value_floats"):
            return Tensor(np.asarray(value, np.float32))
        if name in ("value_int", "value_ints"):
            return Tensor(np.asarray(value, np.int64))
        if name in ("value_string", "value_strings"):
            return np.asarray(value, object)
    raise call.refuse("a sparse constant")


@rule("ConstantOfShape", static=(0,))
def _(call: NodeCall, shape: Tensor) -> Any:
    value = call.attr("value", None)
    sizes = tuple(call.ints(shape, "the shape"))
    held = Tensor(np.zeros(1, np.float32)) if value is None else value
    tensor = held.tensor if isinstance(held, Carried) else held
    filled = Tensor(np.full(sizes, tensor.numpy().reshape(-1)[0], tensor.numpy().dtype))
    return Carried(filled, held.element) if isinstance(held, Carried) else filled
