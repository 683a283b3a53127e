"""Atomic updates of all program instances: each sees what those before it, in instance order, have left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tessera.interp.memory import Memory
from tessera.numerics.bounded import Bounded, certain, lift
from tessera.numerics.formats import format_of, gamma
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
    """Update the places of `indices` where `keep` holds; what was there before each update."""
    blocks = (*indices, *operands, *(() if keep is None else (keep,)))
    whole = np.broadcast_shapes(shape, *(b.shape for b in blocks))
    chosen = np.ones(whole, bool) if keep is None else np.broadcast_to(keep, whole)
    cells = tuple(np.broadcast_to(i, whole)[chosen] for i in indices)
    if isinstance(memory.array, Bounded) and kind == "add" and dtype.is_float:
        added = lift(operands[0])
        parts = (np.broadcast_to(a, whole)[chosen] for a in (added.value, added.radius))
        return _added(memory, dtype, cells, Bounded(*parts), np.zeros(whole, memory.array.value.dtype), chosen)
    values = [np.broadcast_to(certain(o), whole)[chosen] for o in operands]
    array = memory.array.value if isinstance(memory.array, Bounded) else memory.array
    old = np.zeros(whole, array.dtype)
    if not isinstance(memory.array, Bounded):
        old[chosen], _ = _in_turn(array, cells, kind, values)
        return old
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


def _added(memory: Memory, dtype: DType, cells: Any, values: Bounded, old: np.ndarray, chosen: np.ndarray) -> Bounded:
    """Float additions in bound mode: n of them in any order differ by no more than γ(n) times the sum of magnitudes.

    What was there before an update is known only where no other update reaches the place.
    """
    shape = memory.array.shape or (1,)
    cells = cells or (np.zeros(len(values), np.int64),)
    total, known = memory.array.value.reshape(shape), memory.array.radius.reshape(shape)
    count, size, spread = np.zeros(shape, np.int64), np.abs(total) + known, known.copy()
    before = total[cells], known[cells]
    np.add.at(count, cells, 1)
    np.add.at(size, cells, np.abs(values.value) + values.radius)
    np.add.at(spread, cells, values.radius)
    np.add.at(total, cells, values.value)
    form = format_of(dtype)
    factor = np.array([gamma(n, form.unit) for n in range(int(count.max(initial=0)) + 1)])[count]
    known[...] = np.where(count > 0, spread + factor * size + count * form.tiny, known)
    radius = np.zeros(old.shape)
    contested = count[cells] > 1
    old[chosen], radius[chosen] = before[0], np.where(contested, np.inf, before[1])
    return Bounded(old, radius)
