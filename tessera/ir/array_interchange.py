"""Array interchange: converts numbers, lists and arrays of other libraries to elements of tensors; DLPack import and
export.

NumPy exchanges integers, bools and the usual floats. bfloat16, fp8, fp6 and fp4 travel as unsigned integers of their
width on NumPy's side of the capsule, and under their own type code on the other. Format: DLPack 1.1, `dlpack.h`.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, user_location
from tessera.core.shapes import size_to_number
from tessera.core.symbolic_dim import Dim
from tessera.core.types import DType, as_dtype, bf16, fp4, fp6, fp6_e2m3, fp8_e4m3, fp8_e5m2, int64

# DLPack: memory shared with other libraries, for the element types that NumPy's exchange lacks too.
#
# NumPy exchanges integers, bools and the usual floats. The others (bfloat16, fp8, fp6, fp4) travel as unsigned integers
# of their width on NumPy's side of the capsule, and under their own code on the other.
# Format: DLPack 1.1, `dlpack.h`.


UNSIGNED_CODE = 1
DLPACK_CODES: dict[DType, int] = {bf16: 4, fp8_e4m3: 10, fp8_e5m2: 12, fp6_e2m3: 15, fp6: 16, fp4: 17}
DTYPE_BY_CODE = {(code, dtype.numpy.itemsize * 8): dtype for dtype, code in DLPACK_CODES.items()}
NUMPY_CODES = (0, 1, 2, 6)  # signed, unsigned, float, bool: NumPy knows them
# Where the tensor begins in a capsule's structure, by the capsule's name; its type comes 20 bytes later.
TENSOR_OFFSETS = {b"dltensor": 0, b"dltensor_versioned": 32}

_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _DLDataType(ctypes.Structure):
    """DLDataType: the kind of an element, its bits, and its lanes."""

    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]  # noqa: RUF012


class _CapsuleSource:
    """An object that hands a capsule to `numpy.from_dlpack`."""

    def __init__(self, capsule: Any, device: Any) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> Any:
        return self.device


def find_capsule(capsule: Any) -> tuple[int, bytes]:
    """The address of a capsule's tensor (DLTensor), and the capsule's name."""
    name = _capsule_name(capsule)
    return _capsule_pointer(capsule, name) + TENSOR_OFFSETS[name], name


def _capsule_type(capsule: Any) -> _DLDataType:
    return _DLDataType.from_address(find_capsule(capsule)[0] + 20)


def request_capsule(source: Any, **named: Any) -> Any:
    """A versioned capsule, which says whether its memory is writable, if the library supports it."""
    try:
        return source.__dlpack__(max_version=(1, 1), **named)
    except (TypeError, BufferError):
        return source.__dlpack__(**named)


def import_dlpack(source: Any) -> np.ndarray:
    """View another library's tensor in host memory as an array, without a copy.

    Raises:
        DTypeError: its element type is none of ours.
    """
    if not hasattr(source, "__dlpack__"):
        raise DTypeError(
            "this has no DLPack", location=user_location(), received=type(source).__name__, expected="an array"
        )
    capsule = request_capsule(source)
    found = _capsule_type(capsule)
    if found.code in NUMPY_CODES:
        return np.from_dlpack(_CapsuleSource(capsule, source.__dlpack_device__()))
    dtype = DTYPE_BY_CODE.get((found.code, found.bits))
    if dtype is None:
        raise DTypeError(f"DLPack type {found.code} of {found.bits} bits is none of ours", location=user_location())
    found.code = UNSIGNED_CODE
    return np.from_dlpack(_CapsuleSource(capsule, source.__dlpack_device__())).view(dtype.numpy)


def export_dlpack(array: np.ndarray, dtype: DType, **named: Any) -> Any:
    """Make a capsule of these elements for another library, without a copy where the memory is writable."""
    if not array.flags.writeable and named.get("copy") is not False:
        array = array.copy()  # DLPack cannot say that memory must not be written
    if dtype not in DLPACK_CODES:
        return array.__dlpack__(**named)
    capsule = array.view(f"u{array.itemsize}").__dlpack__(**named)
    _capsule_type(capsule).code = DLPACK_CODES[dtype]
    return capsule


# Conversion of arrays of any library, lists and numbers to elements of a tensor.


NON_NUMERIC_KINDS = "OUSmMc"  # NumPy's kinds: objects, text, times, complex numbers


def to_array(data: Any, narrow: bool) -> np.ndarray:
    """The elements of another library's tensor, a number, or lists of numbers; with `narrow`, Python floats as f32."""
    if isinstance(data, (Dim, TypeVar)):
        return np.asarray(size_to_number(data))
    if hasattr(data, "__dlpack__") and not isinstance(data, np.generic):
        return import_dlpack(data)
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise ShapeError(
            f"these lists are no tensor: {error}", location=user_location(), received=type(data).__name__
        ) from None
    if array.dtype.kind in NON_NUMERIC_KINDS:
        raise DTypeError(
            f"{_describe_type(data, array)} is not a tensor or a number", received=shorten_repr(data),
            expected="a number, nested lists of numbers, an array or a tensor",
        )  # fmt: skip
    return array.astype(np.float32) if narrow and array.dtype == np.float64 and not hasattr(data, "dtype") else array


def _describe_type(data: Any, array: np.ndarray) -> str:
    """The type that was received: of the value, or of the first element of a list that is no number."""
    first = next((x for x in array.flat if not isinstance(x, (bool, int, float))), data) if array.size else data
    return type(first if isinstance(data, (list, tuple)) else data).__name__


def shorten_repr(value: Any) -> str:
    """What an error shows of a value: one line of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else text[:57] + "..."


def apply_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """The same elements in the other order in memory.

    Raises:
        ArgumentError: there is no such layout.
    """
    if layout != "column_major":
        raise ArgumentError(
            f"there is no layout {layout!r}", location=user_location(), expected='"row_major" or "column_major"'
        )  # fmt: skip
    return np.asfortranarray(array)


def find_python_storage(dtype: DType) -> Any:
    """The NumPy type that holds such elements and that Python knows."""
    return np.float64 if dtype.is_float else np.int64


def check_integer_range(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Check that an integer type holds the numbers that a user wrote.

    Raises:
        DTypeError: it cannot hold one of them.
    """
    if dtype.is_integer and array.dtype.kind in "iu" and array.size:
        check_integer_fits(int(array.min()), dtype)
        check_integer_fits(int(array.max()), dtype)
    return array


def check_integer_fits(value: Any, dtype: DType) -> Any:
    """Check that an integer type holds a Python number.

    Raises:
        DTypeError: the type cannot hold it.
    """
    if dtype.is_integer and isinstance(value, int):
        info = ml_dtypes.iinfo(dtype.numpy)
        if not info.min <= value <= info.max:
            raise DTypeError(
                f"{value} does not fit {dtype}",
                location=user_location(),
                expected=f"a number from {info.min} to {info.max}",
                received=str(value),
                suggestion="cast the tensor to a wider type first",
            )
    return value


def find_number_dtype(value: bool | int | float | Dim, beside: DType) -> DType:
    """The element type that a Python number takes in an op with elements of another type."""
    if isinstance(value, Dim):
        return beside if beside.is_float or beside.is_integer else int64
    fits = beside.is_float or (beside.is_integer and isinstance(value, int))  # a bool is an int here: 0 or 1
    return beside if fits else as_dtype(type(value))
