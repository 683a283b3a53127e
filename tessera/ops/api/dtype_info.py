"""Element type queries: limits, kinds, result types and lossless conversions (array API data type functions)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, user_location
from tessera.core.types import DType, TensorType, as_dtype, f64, find_number_dtype
from tessera.ir.numerics.conversion import find_float_grid
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.coercion import PYTHON_NUMBERS, promote_types


@dataclass(frozen=True)
class FloatInfo:
    """The limits of a float type: bits, epsilon, largest, least, smallest normal and subnormal number."""

    dtype: DType
    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    smallest_subnormal: float


@dataclass(frozen=True)
class IntegerInfo:
    """The limits of an integer type."""

    dtype: DType
    bits: int
    max: int
    min: int


def _find_element_type(of: Any) -> DType:
    return of.dtype if isinstance(of, Tensor) else as_dtype(of)


@check_arguments
def finfo(of: Any) -> FloatInfo:
    """The limits of a float type, or of that of a tensor.

    >>> from tessera.core.types import fp8_e4m3
    >>> finfo(fp8_e4m3).max, finfo(fp8_e4m3).eps
    (448.0, 0.125)

    Raises:
        DTypeError: the type is not a float type.
    """
    dtype = _find_element_type(of)
    if not dtype.is_float:
        raise DTypeError("finfo needs a float type", location=user_location(), received=str(dtype))
    if dtype is f64:
        digits, least, top = 52, -1022, float(np.finfo(np.float64).max)
    else:
        grid = find_float_grid(dtype)
        digits, least, top = grid.digits, grid.least, grid.top
    return FloatInfo(dtype, dtype.bits, 2.0**-digits, top, -top, 2.0**least, 2.0 ** (least - digits))


@check_arguments
def iinfo(of: Any) -> IntegerInfo:
    """The limits of an integer type, or of that of a tensor.

    >>> iinfo("int4").max
    7

    Raises:
        DTypeError: the type is not an integer type.
    """
    dtype = _find_element_type(of)
    if not dtype.is_integer:
        raise DTypeError("iinfo needs an integer type", location=user_location(), received=str(dtype))
    info = ml_dtypes.iinfo(dtype.numpy)
    return IntegerInfo(dtype, dtype.bits, int(info.max), int(info.min))


@check_arguments
def result_type(*operands: Any) -> DType:
    """The common element type of the operands; float formats do not mix, Python numbers take the type of the others.

    >>> result_type("int8", "int32"), result_type("f16", 1.0)
    (ts.int32, ts.f16)

    Raises:
        DTypeError: two different float types.
    """
    if not operands:
        raise ArgumentError("result_type needs an operand", location=user_location(), expected="tensors or dtypes")
    numbers = [x for x in operands if isinstance(x, PYTHON_NUMBERS)]
    kinds = [_find_element_type(x) for x in operands if not isinstance(x, PYTHON_NUMBERS)]
    found = promote_types([TensorType((), t) for t in kinds]) if kinds else as_dtype(type(numbers[0]))
    for number in numbers:
        found = find_number_dtype(number, found)
    return found


@check_arguments
def can_cast(source: Any, target: Any) -> bool:
    """Whether every value of one type is a value of the other.

    >>> can_cast("int8", "f16"), can_cast("int32", "f32"), can_cast("fp8_e5m2", "fp8_e4m3")
    (True, False, False)
    """
    a, b = _find_element_type(source), _find_element_type(target)
    if a == b or a.kind == "bool":
        return True
    if b.kind == "bool" or (a.is_float and not b.is_float):
        return False
    if a.is_float:
        small, wide = finfo(a), finfo(b)
        return wide.eps <= small.eps and wide.max >= small.max and wide.smallest_subnormal <= small.smallest_subnormal
    low, high = iinfo(a).min, iinfo(a).max
    if b.is_float:  # floats represent each integer up to 2 / eps
        return high < 2 / finfo(b).eps and high <= finfo(b).max
    return iinfo(b).min <= low and high <= iinfo(b).max


DTYPE_KINDS = {
    "bool": ("bool",),
    "signed integer": ("int",),
    "unsigned integer": ("uint",),
    "integral": ("int", "uint"),
    "real floating": ("float",),
    "complex floating": (),
    "numeric": ("int", "uint", "float"),
}


@check_arguments
def isdtype(dtype: Any, kind: Any) -> bool:
    """Whether an element type is one of a kind ("bool", "integral", "real floating", ...), a type, or any of a tuple.

    >>> isdtype("bf16", "real floating"), isdtype("int8", ("bool", "real floating"))
    (True, False)
    """
    if isinstance(kind, tuple):
        return any(isdtype(dtype, each) for each in kind)
    return (
        _find_element_type(dtype).kind in DTYPE_KINDS[kind]
        if isinstance(kind, str) and kind in DTYPE_KINDS
        else _find_element_type(dtype) == as_dtype(kind)
    )
