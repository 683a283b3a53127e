"""The shapes and types of blocks, all of them known where code is generated."""

from __future__ import annotations

from tessera.ir.core import Value
from tessera.types import TensorType, Type


def sizes(type: Type) -> tuple[int, ...]:
    """The shape of a block or of memory, all of it known here."""
    return tuple(int(n) for n in type.shape)  # type: ignore[arg-type]


def block_type(v: Value) -> TensorType:
    """The type of a block or scalar."""
    assert isinstance(v.type, TensorType)
    return v.type
