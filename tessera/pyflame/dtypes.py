"""Element types of PyFlame: an enumeration over Tessera's (PyFlame API reference, "Data Types")."""

from __future__ import annotations

import enum
from typing import Any

from tessera.core import types
from tessera.core.errors import DTypeError, user_location


class DType(enum.Enum):
    """An element type. `int64` is the type of sums of integers and of indices; the reference lists the others.

    >>> DType.float32, DType.float32.itemsize
    (DType.float32, 4)
    """

    float32 = types.f32
    float16 = types.f16
    bfloat16 = types.bf16
    int32 = types.int32
    int16 = types.int16
    int8 = types.int8
    bool_ = types.bool_
    int64 = types.int64

    def __repr__(self) -> str:
        return f"DType.{self.name}"

    __str__ = __repr__

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return int(self.value.numpy.itemsize)

    @property
    def is_float(self) -> bool:
        """Whether this is a floating-point type."""
        return bool(self.value.is_float)


float32, float16, bfloat16 = DType.float32, DType.float16, DType.bfloat16
int32, int16, int8, int64, bool_ = DType.int32, DType.int16, DType.int8, DType.int64, DType.bool_
_BY_ELEMENT = {member.value: member for member in DType}
_NAMES = ", ".join(f"pf.{member.name}" for member in DType)


def as_dtype(value: Any) -> DType:
    """A DType from a DType, its name, an element type of Tessera or a type of NumPy.

    >>> import numpy as np
    >>> as_dtype("float16"), as_dtype(np.int8), as_dtype(float)
    (DType.float16, DType.int8, DType.float32)

    Raises:
        DTypeError: PyFlame does not have the type.
    """
    if isinstance(value, DType):
        return value
    if isinstance(value, str) and value in DType.__members__:
        return DType[value]
    try:
        found = _BY_ELEMENT.get(types.as_dtype(value))
    except DTypeError:
        found = None
    if found is None:
        raise DTypeError(
            "PyFlame does not have this element type", location=user_location(), expected=_NAMES,
            received=repr(value), suggestion="pass dtype=, as in pf.tensor(data, dtype=pf.float32)",
        )  # fmt: skip
    return found


def dtype_size(dtype: Any) -> int:
    """The bytes of an element of a type.

    >>> dtype_size(float16)
    2
    """
    return as_dtype(dtype).itemsize


def dtype_name(dtype: Any) -> str:
    """The name of a type.

    >>> dtype_name(float32)
    'float32'
    """
    return as_dtype(dtype).name
