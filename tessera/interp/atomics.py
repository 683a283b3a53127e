"""Atomic updates of all program instances: each sees what those before it, in instance order, have left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tessera.errors import ExecutionError
from tessera.interp.memory import Memory
from tessera.numerics.bounded import Bounded, certain
from tessera.numerics.formats import format_of
from tessera.types import DType

# What becomes of the old value and the operands.
CHANGES: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exchange": lambda old, new: new,
    "compare": lambda old, new, expected: np.where(old == expected, new, old),
}
# What does not depend on the order in which several updates reach one place.
_ANY_ORDER = ("add", "max", "min", "and", "or", "xor")


def update(
    memory: Memory, dtype: DType, indices: Sequence[Any], keep: Any, shape: tuple[int, ...], kind: str, operands: Any
) -> Any:
    """Update the places of `indices` where `keep` holds; what was there before each update.

    Raises:
        ExecutionError: in bound mode, the result depends on how float sums are ordered.
    """
    blocks = (*indices, *operands, *(() if keep is None else (keep,)))
    whole = np.broadcast_shapes(shape, *(b.shape for b in blocks))
    chosen = np.ones(whole, bool) if keep is None else np.broadcast_to(keep, whole)
    cells = tuple(np.broadcast_to(i, whole)[chosen] for i in indices)
    values = [np.broadcast_to(certain(o), whole)[chosen] for o in operands]
    array = memory.array.value if isinstance(memory.array, Bounded) else memory.array
    old = np.zeros(whole, array.dtype)
    if not isinstance(memory.array, Bounded):
        old[chosen], _ = _in_turn(array, cells, kind, values)
        return old
    if kind == "add" and dtype.is_float:
        _check_sums(array, cells, values[0], dtype)
    certain(memory.array[cells])
    old[chosen], contested = _in_turn(array, cells, kind, values)
    radius = np.zeros(whole)
    radius[chosen] = np.where(contested, np.inf, 0.0)
    if kind not in _ANY_ORDER:
        memory.array.radius[cells] = np.where(contested, np.inf, 0.0)
    return Bounded(old, radius)


def _in_turn(array: np.ndarray, cells: Any, kind: str, values: Sequence[np.ndarray]) -> tuple[Any, Any]:
    """Updates in order; the old values, and which places were updated more than once."""
    count = len(values[0])
    old = np.zeros(count, array.dtype)
    places = np.ravel_multi_index(cells, array.shape) if cells else np.zeros(count, np.int64)
    for lanes in _turns(places):
        at = tuple(c[lanes] for c in cells)
        old[lanes] = array[at]
        array[at] = CHANGES[kind](old[lanes], *(v[lanes] for v in values))
    _, inverse, counts = np.unique(places, return_inverse=True, return_counts=True)
    return old, counts[inverse.reshape(-1)] > 1


def _turns(places: np.ndarray) -> Iterator[np.ndarray]:
    """Sets of updates to different places: those of one place take turns, in order."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)]
    starts = np.flatnonzero(first)
    turn = np.arange(len(places)) - np.repeat(starts, np.diff(np.r_[starts, len(places)]))
    by_turn = np.argsort(turn, kind="stable")
    return iter(np.split(order[by_turn], np.flatnonzero(np.diff(turn[by_turn])) + 1))


def _check_sums(array: np.ndarray, cells: Any, values: np.ndarray, dtype: DType) -> None:
    """Whole numbers that the format holds exactly add up alike in every order; nothing else does."""
    before = array[cells] if cells else array.reshape(1)
    size = float(np.abs(values).sum() + np.abs(before).max(initial=0.0))
    exact = (values == np.trunc(values)).all() and (before == np.trunc(before)).all()
    if not exact or not size * format_of(dtype).unit <= 1:
        raise ExecutionError(
            "bound mode does not know in which order atomic additions of floats happen",
            expected="whole numbers small enough that every order gives the same",
            suggestion="compare this kernel on such inputs, or reduce within the group first",
        )
