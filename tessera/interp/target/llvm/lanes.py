"""Register values: arrays with a leading lane axis of length 1 (the same for all) or of all lanes.

A vector has a trailing axis; an array or struct is a tuple of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.interp.target.llvm.types import Aggregate, Int, Type

Value = np.ndarray | tuple


@dataclass(frozen=True)
class Lanes:
    """A scalar argument that differs between lanes: one element each."""

    values: Any


def choose(value: Value, lanes: np.ndarray) -> Value:
    """The value of some lanes."""
    if isinstance(value, tuple):
        return tuple(choose(part, lanes) for part in value)
    return value if len(value) == 1 else value[lanes]


def widen(value: np.ndarray, count: int) -> np.ndarray:
    """The value with a lane axis of full length."""
    return value if len(value) == count else np.broadcast_to(value, (count, *value.shape[1:]))


def place(old: Value | None, value: Value, lanes: np.ndarray, count: int) -> Value:
    """A copy of `old` in which some lanes have a new value."""
    if isinstance(value, tuple):
        olds = old if isinstance(old, tuple) else (None,) * len(value)
        return tuple(place(o, v, lanes, count) for o, v in zip(olds, value, strict=True))
    whole = np.empty((count, *value.shape[1:]), value.dtype)
    whole[...] = np.zeros((), value.dtype) if old is None else old
    whole[lanes] = value
    return whole


def undefined(type: Type) -> Value:
    """What stands for undef and poison: a pattern that shows when it is used."""
    if isinstance(type, Aggregate):
        return tuple(undefined(part) for _, part in type.parts)
    count = int(np.prod(type.lanes, initial=1))
    raw = np.full(count * type.dtype.itemsize, 0 if type.dtype == bool else 0xCB, np.uint8)
    return canonical(raw.view(type.dtype).reshape(1, *type.lanes), type.scalar)


def zero(type: Type) -> Value:
    """The value whose bits are all zero."""
    if isinstance(type, Aggregate):
        return tuple(zero(part) for _, part in type.parts)
    return np.zeros((1, *type.lanes), type.dtype)


def canonical(value: np.ndarray, type: Type) -> np.ndarray:
    """The low bits of an integer of unusual width, sign-extended in its container."""
    if not isinstance(type, Int) or type.native or type.bits == 1:
        return value
    spare = 8 * value.dtype.itemsize - type.bits
    return (value << spare) >> spare


def unsigned(value: np.ndarray, type: Type) -> np.ndarray:
    """An integer's bits as an unsigned number; a bool stays one."""
    if value.dtype == bool:
        return value
    bits = value.view(UNSIGNED[value.dtype])
    if isinstance(type, Int) and not type.native:
        return bits & bits.dtype.type((1 << type.bits) - 1)
    return bits


UNSIGNED = {np.dtype(f"i{n}"): np.dtype(f"u{n}") for n in (1, 2, 4, 8)}
SIGNED = {u: s for s, u in UNSIGNED.items()}


def integers(numbers: Sequence[int], type: Type) -> np.ndarray:
    """Python integers, wrapped to the width of a type."""
    if type.dtype == bool:
        return np.array([n & 1 for n in numbers], bool)
    mask = (1 << 8 * type.dtype.itemsize) - 1
    raw = np.array([n & mask for n in numbers], UNSIGNED[type.dtype])
    return canonical(raw.view(type.dtype), type)


def spread_scalars(*values: np.ndarray) -> list[np.ndarray]:
    """Scalars with a trailing axis wherever one of the values is a vector."""
    deepest = max(v.ndim for v in values)
    return [v if v.ndim == deepest else v[:, None] for v in values]


def by_part(function: Callable[..., np.ndarray], *values: Value) -> Value:
    """Apply a function to arrays, or to each member of tuples alike."""
    if isinstance(values[0], tuple):
        return tuple(by_part(function, *parts) for parts in zip(*values, strict=True))
    return function(*values)
