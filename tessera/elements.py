"""What becomes the elements of a tensor: arrays of any library, lists and numbers."""

from __future__ import annotations

from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from tessera.dlpack import taken
from tessera.errors import ArgumentError, DTypeError, ShapeError, here
from tessera.shapes.dim import Dim
from tessera.shapes.reading import number_of
from tessera.types import DType, as_dtype

NO_NUMBERS = "OUSmMc"  # NumPy's kinds: objects, text, times, complex numbers


def array_of(data: Any, narrow: bool) -> np.ndarray:
    """The elements of another library's tensor, a number, or lists of numbers; with `narrow`, Python floats as f32."""
    if isinstance(data, (Dim, TypeVar)):
        return np.asarray(number_of(data))
    if hasattr(data, "__dlpack__") and not isinstance(data, np.generic):
        return taken(data)
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise ShapeError(f"these lists are no tensor: {error}", location=here(), received=type(data).__name__) from None
    if array.dtype.kind in NO_NUMBERS:
        raise DTypeError(
            f"{_named(data, array)} is not a tensor or a number", received=_short(data),
            expected="a number, nested lists of numbers, an array or a tensor",
        )  # fmt: skip
    return array.astype(np.float32) if narrow and array.dtype == np.float64 and not hasattr(data, "dtype") else array


def _named(data: Any, array: np.ndarray) -> str:
    """What came: the type of the value, or of the first element of a list that is none."""
    first = next((x for x in array.flat if not isinstance(x, (bool, int, float))), data) if array.size else data
    return type(first if isinstance(data, (list, tuple)) else data).__name__


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else text[:57] + "..."


def laid_out(array: np.ndarray, layout: str) -> np.ndarray:
    """The same elements in the other order in memory.

    Raises:
        ArgumentError: there is no such layout.
    """
    if layout != "column_major":
        raise ArgumentError(
            f"there is no layout {layout!r}", location=here(), expected='"row_major" or "column_major"'
        )  # fmt: skip
    return np.asfortranarray(array)


def python_type(dtype: DType) -> Any:
    """The NumPy type that holds such elements and that Python knows."""
    return np.float64 if dtype.is_float else np.int64


def checked(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Numbers that a user wrote, which an integer type must be able to hold.

    Raises:
        DTypeError: it cannot hold one of them.
    """
    if dtype.is_integer and array.dtype.kind in "iu" and array.size:
        fitting(int(array.min()), dtype)
        fitting(int(array.max()), dtype)
    return array


def fitting(value: Any, dtype: DType) -> Any:
    """A Python number that is to be of an integer type, which must have it.

    Raises:
        DTypeError: the type cannot hold it.
    """
    if dtype.is_integer and isinstance(value, int):
        info = ml_dtypes.iinfo(dtype.numpy)
        if not info.min <= value <= info.max:
            raise DTypeError(
                f"{value} does not fit {dtype}", location=here(), expected=f"a number from {info.min} to {info.max}",
                received=str(value), suggestion="cast the tensor to a wider type first",
            )  # fmt: skip
    return value


def number_type(value: bool | int | float, beside: DType) -> DType:
    """The element type that a Python number takes beside elements of another type."""
    fits = beside.is_float or (beside.is_integer and isinstance(value, int))  # a bool is an int here: 0 or 1
    return beside if fits else as_dtype(type(value))
