"""Lane values: register contents as arrays with a leading lane axis, and the faults of a lane.

The lane axis has length 1 (uniform) or the number of lanes. A vector has a trailing axis; an array or struct is a tuple
of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.errors import ExecutionError, TesseraError
from tessera.interp.target.llvm.text.syntax import LlvmAggregate, LlvmInt, LlvmType


class LaneFault(Exception):
    """A fault of an instruction: its message, the error it becomes, and the index of the faulting active lane."""

    def __init__(self, message: str, kind: type[TesseraError] = ExecutionError, lane: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.lane = lane


RegisterValue = np.ndarray | tuple


@dataclass(frozen=True)
class PerLane:
    """A scalar argument that differs between lanes: one value for each."""

    values: Any


def select_lanes(value: RegisterValue, lanes: np.ndarray) -> RegisterValue:
    """The values of some lanes."""
    if isinstance(value, tuple):
        return tuple(select_lanes(part, lanes) for part in value)
    return value if len(value) == 1 else value[lanes]


def broadcast_lanes(value: np.ndarray, count: int) -> np.ndarray:
    """The value with a lane axis of full length."""
    return value if len(value) == count else np.broadcast_to(value, (count, *value.shape[1:]))


def copy_broadcast(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A copy of another shape; np.broadcast_to takes longer than the copy of a register."""
    out = np.empty(shape, value.dtype)
    out[...] = value
    return out


def scatter_lanes(old: RegisterValue | None, value: RegisterValue, lanes: np.ndarray, count: int) -> RegisterValue:
    """A copy of `old` in which some lanes have new values."""
    if isinstance(value, tuple):
        olds = old if isinstance(old, tuple) else (None,) * len(value)
        return tuple(scatter_lanes(o, v, lanes, count) for o, v in zip(olds, value, strict=True))
    whole = np.empty((count, *value.shape[1:]), value.dtype)
    whole[...] = np.zeros((), value.dtype) if old is None else old
    whole[lanes] = value
    return whole


def make_undefined(type: LlvmType) -> RegisterValue:
    """The value of undef and poison: a bit pattern that is easy to recognise."""
    if isinstance(type, LlvmAggregate):
        return tuple(make_undefined(part) for _, part in type.parts)
    count = int(np.prod(type.lanes, initial=1))
    raw = np.full(count * type.dtype.itemsize, 0 if type.dtype == bool else 0xCB, np.uint8)
    return canonicalise(raw.view(type.dtype).reshape(1, *type.lanes), type.scalar)


def make_zero(type: LlvmType) -> RegisterValue:
    """The value with all bits zero."""
    if isinstance(type, LlvmAggregate):
        return tuple(make_zero(part) for _, part in type.parts)
    return np.zeros((1, *type.lanes), type.dtype)


def canonicalise(value: np.ndarray, type: LlvmType) -> np.ndarray:
    """An integer of a width that NumPy lacks: its low bits, sign-extended in a wider dtype."""
    if not isinstance(type, LlvmInt) or type.native or type.bits == 1:
        return value
    spare = 8 * value.dtype.itemsize - type.bits
    return (value << spare) >> spare


def view_unsigned(value: np.ndarray, type: LlvmType) -> np.ndarray:
    """An integer's bits as an unsigned number; a bool stays a bool."""
    if value.dtype == bool:
        return value
    bits = value.view(UNSIGNED_DTYPES[value.dtype])
    if isinstance(type, LlvmInt) and not type.native:
        return bits & bits.dtype.type((1 << type.bits) - 1)
    return bits


UNSIGNED_DTYPES = {np.dtype(f"i{n}"): np.dtype(f"u{n}") for n in (1, 2, 4, 8)}
SIGNED_DTYPES = {u: s for s, u in UNSIGNED_DTYPES.items()}


def wrap_integers(numbers: Sequence[int], type: LlvmType) -> np.ndarray:
    """Python integers, wrapped to the width of a type."""
    if type.dtype == bool:
        return np.array([n & 1 for n in numbers], bool)
    mask = (1 << 8 * type.dtype.itemsize) - 1
    raw = np.array([n & mask for n in numbers], UNSIGNED_DTYPES[type.dtype])
    return canonicalise(raw.view(type.dtype), type)


def spread_scalars(*values: np.ndarray) -> list[np.ndarray]:
    """Scalars with a trailing axis, if one of the values is a vector."""
    deepest = max(v.ndim for v in values)
    return [v if v.ndim == deepest else v[:, None] for v in values]


def map_members(function: Callable[..., np.ndarray], *values: RegisterValue) -> RegisterValue:
    """Apply a function to arrays, or to each member of tuples."""
    if isinstance(values[0], tuple):
        return tuple(map_members(function, *parts) for parts in zip(*values, strict=True))
    return function(*values)
