"""Block types: static shapes and element types of the values of a tile function."""

from __future__ import annotations

from tessera.core.types import TensorType, Type
from tessera.ir.core import Value


def static_shape(type: Type) -> tuple[int, ...]:
    """The shape of a block or of memory, which has no symbolic sizes."""
    return tuple(int(n) for n in type.shape)  # type: ignore[arg-type]


def get_tensor_type(v: Value) -> TensorType:
    """The type of a block or scalar."""
    assert isinstance(v.type, TensorType)
    return v.type
