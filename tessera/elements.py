"""What becomes the elements of a tensor: arrays of any library, lists and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.dlpack import taken
from tessera.errors import ArgumentError, ShapeError, here
from tessera.types import DType, as_dtype


def array_of(data: Any, narrow: bool) -> np.ndarray:
    """The elements of another library's tensor, a number, or lists of numbers; with `narrow`, Python floats as f32."""
    if hasattr(data, "__dlpack__") and not isinstance(data, np.generic):
        return taken(data)
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise ShapeError(f"these lists are no tensor: {error}", location=here(), received=type(data).__name__) from None
    return array.astype(np.float32) if narrow and array.dtype == np.float64 and not hasattr(data, "dtype") else array


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


def number_type(value: bool | int | float, beside: DType) -> DType:
    """The element type that a Python number takes beside elements of another type."""
    fits = beside.is_float or (beside.is_integer and isinstance(value, int))  # a bool is an int here: 0 or 1
    return beside if fits else as_dtype(type(value))
