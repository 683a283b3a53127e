"""Element types of ONNX: those that Tessera has, and narrower ones that are carried in a wider type.

A carried value holds each element exactly; only conversions and moves are defined for it, as in ONNX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from tessera.core import types
from tessera.core.errors import DTypeError, FileError, TesseraError
from tessera.core.types import DType, as_dtype
from tessera.ir.tensor import Tensor

T = ir.DataType
# The element types that are Tessera's own.
ELEMENTS: dict[ir.DataType, DType] = {
    T.FLOAT: types.f32, T.DOUBLE: types.f64, T.FLOAT16: types.f16, T.BFLOAT16: types.bf16,
    T.FLOAT8E4M3FN: types.fp8_e4m3, T.FLOAT8E5M2: types.fp8_e5m2, T.FLOAT4E2M1: types.fp4,
    T.FLOAT6E2M3: types.fp6_e2m3, T.FLOAT6E3M2: types.fp6,
    T.INT4: types.int4, T.INT8: types.int8, T.INT16: types.int16, T.INT32: types.int32, T.INT64: types.int64,
    T.UINT8: types.uint8, T.UINT16: types.uint16, T.UINT32: types.uint32, T.UINT64: types.uint64, T.BOOL: types.bool_,
}  # fmt: skip
# The others, and the types that carry them.
CARRIERS: dict[ir.DataType, DType] = {
    T.UINT4: types.uint8, T.UINT2: types.uint8, T.INT2: types.int8,
    T.FLOAT8E4M3FNUZ: types.f32, T.FLOAT8E5M2FNUZ: types.f32, T.FLOAT8E8M0: types.f32,
}  # fmt: skip
NAMES = {v: k for k, v in ELEMENTS.items()}


@dataclass(frozen=True)
class Carried:
    """A tensor whose elements stand for those of an ONNX type that Tessera does not have."""

    tensor: Tensor
    element: ir.DataType

    @property
    def shape(self) -> tuple[Any, ...]:
        """The size of each axis."""
        return self.tensor.shape


def element_type(value: Any) -> ir.DataType:
    """The ONNX element type of a value: a tensor, a carried one, or an array of strings."""
    if isinstance(value, Carried):
        return value.element
    return NAMES[value.dtype] if isinstance(value, Tensor) else T.STRING


def find_element(value: int | ir.DataType, what: str) -> DType:
    """The Tessera type of an ONNX element type.

    Raises:
        DTypeError: it has none: strings, complex numbers, or a type that is only carried.
    """
    element = ir.DataType(value)
    if element not in ELEMENTS:
        raise DTypeError(
            f"{what}: elements of type {element.name} are not supported",
            expected=", ".join(e.name for e in ELEMENTS), received=element.name,
        )  # fmt: skip
    return ELEMENTS[element]


def array_to_value(array: np.ndarray, what: str) -> Any:
    """An array as a value: a Tensor, a Carried, or strings as an array of objects.

    Raises:
        DTypeError: complex numbers, or other elements that ONNX does not have.
    """
    if array.dtype.kind in "OSU":
        return np.asarray(array, object)
    try:
        element = ir.DataType.from_numpy(array.dtype)
    except TypeError:
        element = ir.DataType.UNDEFINED
    if element in CARRIERS:
        return Carried(Tensor(array.astype(CARRIERS[element].numpy)), element)
    find_element(element, what)
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return Tensor(native, dtype=as_dtype(native.dtype))


def array_to_tensor(tensor: Any) -> Any:
    """A constant of a model as a value.

    Raises:
        FileError: its data is truncated. DTypeError: its elements are complex numbers.
    """
    try:
        array = tensor.numpy()
        wanted = tuple(int(n) for n in tensor.shape)
        if array.shape != wanted:
            raise ValueError(f"{array.size} elements for {wanted}")
    except TesseraError:
        raise
    except Exception as error:  # onnx-ir raises errors of many types for malformed data
        raise FileError(
            f"the tensor {tensor.name} is truncated or malformed", received=" ".join(str(error).split())[:200]
        ) from None
    if tensor.dtype == ir.DataType.STRING:
        return np.array([s.decode() if isinstance(s, bytes) else s for s in array.reshape(-1)], object).reshape(wanted)
    return array_to_value(array, f"the tensor {tensor.name}")


def value_to_array(value: Any) -> Any:
    """A result as an array of its ONNX element type; a sequence as a list of them."""
    if isinstance(value, list):
        return [value_to_array(v) for v in value]
    if isinstance(value, Carried):
        return value.tensor.numpy().astype(value.element.numpy())
    return np.asarray(value.numpy()) if isinstance(value, Tensor) else value
