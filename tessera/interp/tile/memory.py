"""Memory of the Tile interpreter: strided views, gathers, scatters and atomics for all program instances.

Every array of values has leading *instance* axes (one for each grid axis, and one for the tiles of a
group where there are several), each of its full size or 1, and then the axes of the block, likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter, methodcaller, mul
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tessera.core.errors import OutOfBoundsError
from tessera.core.types import DType
from tessera.interp.tile.affine import AffineScalar
from tessera.ir.numerics.error_model import find_rounding_model, gamma
from tessera.ir.numerics.interval_arithmetic import IntervalArray, require_exact, to_interval
from tessera.ir.rules import Rules
from tessera.ops.tensor import basic, shape


@dataclass
class InstanceMemory:
    """The memory of a ref: an array whose first `lead` axes (if any) are the instances' private copies."""

    array: Any  # a NumPy array, or an IntervalArray in bound mode
    name: str
    lead: int = 0
    written: bool = True  # whether the kernel writes it: if not, reads need no copy
    shape: tuple[int, ...] = field(init=False)  # the shape of one copy

    def __post_init__(self) -> None:
        self.shape = self.array.shape[self.lead :]

    def view(self, starts: Sequence[Any], block: tuple[int, ...], count: tuple[int, ...]) -> np.ndarray | None:
        """All instances' blocks at affine starts as one strided view.

        None where a start is an array, a block is out of bounds, or the memory is an IntervalArray.
        """
        array, lead = self.array, self.lead
        if type(array) is not np.ndarray:
            return None
        strides, shape = array.strides, array.shape
        steps, origins = [0] * len(count), [0] * lead
        for axis in range(lead):
            steps[axis] = strides[axis] if shape[axis] > 1 else 0
        for start, length, size, stride in zip(starts, block, self.shape, strides[lead:], strict=True):
            if type(start) is not AffineScalar:
                return None
            low = high = start.origin
            for axis, step in enumerate(start.steps):
                if step > 0:
                    high += step * (count[axis] - 1)
                    steps[axis] += step * stride
                elif step:
                    low += step * (count[axis] - 1)
                    steps[axis] += step * stride
            if length and (low < 0 or high > size - length):
                return None
            origins.append(start.origin)
        sizes = [n if step else 1 for n, step in zip(count, steps, strict=True)]
        return _make_strided_view(array, origins, (*sizes, *block), (*steps, *strides[lead:]))


@dataclass
class BlockAccess:
    """Access to blocks: their memory, a start for each axis (affine or an array), their shape, and the instances."""

    memory: InstanceMemory
    starts: list[Any]
    block: tuple[int, ...]
    count: tuple[int, ...]

    def inside(self) -> bool:
        """Whether every instance's block is in bounds."""
        for start, length, size in zip(self.starts, self.block, self.memory.shape, strict=True):
            if length and not _in_bounds(start, length, size, self.count):
                return False
        return True

    def window(self) -> Any:
        """All instances' blocks as one strided view, where their starts form arithmetic progressions; else None."""
        array = self.memory.array
        if type(array) is np.ndarray:
            return self._window(array)
        value, radius = self._window(array.value), self._window(array.radius)
        return None if value is None else IntervalArray(value, radius)

    def _window(self, array: np.ndarray) -> np.ndarray | None:
        lead = self.memory.lead
        strides = array.strides
        steps, origins = [0] * len(self.count), [0] * lead
        for axis in range(lead):
            steps[axis] = strides[axis] if array.shape[axis] > 1 else 0
        for start, stride in zip(self.starts, strides[lead:], strict=True):
            found = start if type(start) is AffineScalar else find_progression(start)
            if found is None:
                return None
            origins.append(found.origin)
            for axis, step in enumerate(found.steps):
                if step:
                    steps[axis] += step * stride
        shape = [n if step else 1 for n, step in zip(self.count, steps, strict=True)]
        # `inside` has checked the bounds.
        return _make_strided_view(array, origins, (*shape, *self.block), (*steps, *strides[lead:]))

    def indices(self) -> list[np.ndarray]:
        """An index array for each axis of the memory, over the instance axes and the block axes."""
        rank, depth = len(self.count), len(self.block)
        found = [_axis_range(n, a, rank + depth) for a, n in enumerate(self.memory.array.shape[: self.memory.lead])]
        for axis, (start, n) in enumerate(zip(self.starts, self.block, strict=True)):
            start = start.array(self.count) if isinstance(start, AffineScalar) else start
            found.append(start.reshape(start.shape + (1,) * depth) + _axis_range(n, rank + axis, rank + depth))
        return found


def _in_bounds(start: Any, length: int, size: int, count: tuple[int, ...]) -> bool:
    if type(start) is AffineScalar:
        low, high = start.ends(count)
    elif start.size == 1:
        low = high = start.item()
    else:
        low, high = start.min(), start.max()
    return bool(low >= 0 and high <= size - length)  # the sum of the other two may overflow


def find_progression(start: np.ndarray) -> AffineScalar | None:
    """Find the affine scalar of an array of instance axes, or None."""
    origin = int(start.flat[0])
    steps, guess = [0] * start.ndim, np.int64(origin)
    for axis, size in enumerate(start.shape):
        if size > 1:
            second = tuple(1 if a == axis else 0 for a in range(start.ndim))
            steps[axis] = int(start[second]) - origin
            guess = guess + steps[axis] * _axis_range(size, axis, start.ndim)
    return (
        AffineScalar(origin, tuple(steps))
        if start.size == 1 or np.array_equal(np.broadcast_to(guess, start.shape), start)
        else None
    )


def _make_strided_view(
    array: np.ndarray, origins: Sequence[int], shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    """Make a view of an array's memory from the element at `origins` on."""
    builtin = array.dtype.isbuiltin == 1  # ml_dtypes has no buffer protocol: view the bytes
    if array.flags.c_contiguous and array.size:
        raw = array if builtin else array.reshape(-1).view(np.uint8)
        return np.ndarray(shape, array.dtype, raw, sum(map(mul, origins, array.strides)), strides)
    moved = array[tuple(map(slice, origins, array.shape))]
    if builtin:
        return as_strided(moved, shape, strides)
    return as_strided(moved.view(f"V{array.itemsize}"), shape, strides).view(array.dtype)


def _axis_range(size: int, axis: int, rank: int) -> np.ndarray:
    return np.arange(size).reshape((1,) * axis + (size,) + (1,) * (rank - axis - 1))


def expand_block_axes(array: np.ndarray, depth: int) -> np.ndarray:
    """Append `depth` block axes of size 1 to an array of instance axes."""
    return array.reshape(array.shape + (1,) * depth)


def read_blocks(place: BlockAccess, mask: np.ndarray | None, other: Any, active: np.ndarray | None, clip: bool) -> Any:
    """Read blocks: `other` where the mask is false or, with `clip`, out of bounds."""
    if place.inside():
        data = place.window()
        if data is None:
            data = take_elements(place.memory.array, place.indices())
        elif place.memory.written:
            data = data.copy()
        return data if mask is None else np.where(mask, data, _default_value(other, data.dtype))
    depth = len(place.block)
    lanes = None if active is None else expand_block_axes(active, depth)
    indices, valid = check_indices(place.memory, place.indices(), _and_masks(mask, lanes), clip)
    data = take_elements(place.memory.array, indices)
    keep = _and_masks(mask, valid)
    return data if keep is None else np.where(keep, data, _default_value(other, data.dtype))


def take_elements(array: Any, indices: Sequence[np.ndarray]) -> Any:
    """The elements at indices; an empty array has none, where all are masked, and zeros stand for them."""
    if 0 not in array.shape:
        return array[tuple(indices)]
    zeros = np.zeros(np.broadcast_shapes(*(np.shape(i) for i in indices)), array.dtype)
    return IntervalArray(zeros) if isinstance(array, IntervalArray) else zeros


def write_blocks(
    place: BlockAccess, value: Any, mask: np.ndarray | None, active: np.ndarray | None, clip: bool
) -> None:
    """Write blocks; masked, inactive and (with `clip`) out-of-bounds elements are not written."""
    depth = len(place.block)
    lanes = None if active is None else expand_block_axes(active, depth)
    keep = _and_masks(mask, lanes)
    inside = place.inside()
    if inside and keep is None:
        window = place.window()
        if window is not None:
            window[...] = keep_last_instance(value, window.shape)
            return
    indices = place.indices()
    if not inside:
        indices, valid = check_indices(place.memory, indices, keep, clip)
        keep = _and_masks(keep, valid)
    scatter_elements(place.memory.array, indices, value, keep)


def scatter_elements(array: Any, indices: Sequence[np.ndarray], value: Any, keep: np.ndarray | None) -> None:
    """Write elements where `keep` holds."""
    if keep is None:
        shape = np.broadcast_shapes(*(i.shape for i in indices)) if indices else ()
        array[tuple(indices)] = keep_last_instance(value, shape)
        return
    shape = np.broadcast_shapes(keep.shape, value.shape, *(i.shape for i in indices))
    chosen = np.broadcast_to(keep, shape)
    held = np.broadcast_to(value, shape)[chosen]
    if indices:
        array[tuple(np.broadcast_to(i, shape)[chosen] for i in indices)] = held
    elif chosen.any():  # a scalar: the last instance's value is stored
        array[...] = held[-1]


def keep_last_instance(value: Any, shape: tuple[int, ...]) -> Any:
    """Keep the last instance's value where several instances write one element."""
    if value.shape == shape:
        return value
    index = tuple(slice(-1, None) if n > 1 and m == 1 else slice(None) for n, m in zip(value.shape, shape, strict=True))
    return value[index]


def _and_masks(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _default_value(other: Any, dtype: np.dtype) -> Any:
    return np.zeros((), dtype) if other is None else other


EDGE_ADVICE = 'guard it with a mask, or clip it at the edge: tile.load(..., other=0.0), tile.store(..., edge="clip")'


def check_indices(
    memory: InstanceMemory, indices: list[np.ndarray], wanted: np.ndarray | None, clip: bool = False
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Clamp indices, and return which elements are in bounds (None for all)."""
    valid: np.ndarray | None = None
    safe = []
    for axis, (index, size) in enumerate(zip(indices, memory.array.shape, strict=True)):
        if index.size and (index.min() < 0 or index.max() >= size):
            good = (index >= 0) & (index < size)
            bad = ~good if wanted is None else ~good & wanted
            if not clip and bad.any():
                raise _out_of_bounds_error(memory, axis, np.broadcast_to(index, bad.shape)[bad][0], size, bad)
            valid = good if valid is None else valid & good
            index = np.where(good, index, 0)
        safe.append(index)
    return safe, valid


def _out_of_bounds_error(memory: InstanceMemory, axis: int, index: int, size: int, bad: np.ndarray) -> OutOfBoundsError:
    error = OutOfBoundsError(
        f"index {int(index)} is outside axis {axis - memory.lead} of {memory.name}, whose size is {size}",
        expected=f"indices from 0 to {size - 1}",
        received=str(int(index)),
        suggestion=EDGE_ADVICE,
    )
    error.lane = tuple(int(i) for i in np.argwhere(bad)[0])
    return error


def allocate_memory(
    lead: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype, name: str, bound: bool, padding: int = 0
) -> InstanceMemory:
    """Allocate memory for each instance, filled with a poison value; rows have `padding` unused elements after them."""
    rows = (*shape[:-1], shape[-1] + padding) if padding else shape
    array = np.empty((*lead, *rows), dtype)
    array.view(np.uint8)[...] = 0xFF  # NaN in every float format
    array = array[..., : shape[-1]] if padding else array
    return InstanceMemory(to_interval(array) if bound else array, name, len(lead))


# new value = rule(old value, operands)
ATOMIC_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exchange": lambda old, new: new,
    "compare": lambda old, new, expected: np.where(old == expected, new, old),
}
# Updates whose result does not depend on their order.
_COMMUTATIVE = ("add", "max", "min", "and", "or", "xor")


def update_atomically(
    memory: InstanceMemory,
    dtype: DType,
    indices: Sequence[Any],
    keep: Any,
    shape: tuple[int, ...],
    kind: str,
    operands: Any,
) -> Any:
    """Atomically update the elements at `indices` where `keep` holds, in instance order; return the old values."""
    blocks = (*indices, *operands, *(() if keep is None else (keep,)))
    whole = np.broadcast_shapes(shape, *(b.shape for b in blocks))
    chosen = np.ones(whole, bool) if keep is None else np.broadcast_to(keep, whole)
    cells = tuple(np.broadcast_to(i, whole)[chosen] for i in indices)
    if isinstance(memory.array, IntervalArray) and kind == "add" and dtype.is_float:
        added = to_interval(operands[0])
        parts = (np.broadcast_to(a, whole)[chosen] for a in (added.value, added.radius))
        return _add_with_bounds(
            memory, dtype, cells, IntervalArray(*parts), np.zeros(whole, memory.array.value.dtype), chosen
        )
    values = [np.broadcast_to(require_exact(o), whole)[chosen] for o in operands]
    array = memory.array.value if isinstance(memory.array, IntervalArray) else memory.array
    old = np.zeros(whole, array.dtype)
    if not isinstance(memory.array, IntervalArray):
        old[chosen], _ = _update_serially(array, cells, kind, values)
        return old
    require_exact(memory.array[cells])
    old[chosen], contested = _update_serially(array, cells, kind, values)
    radius = np.zeros(whole)
    radius[chosen] = np.where(contested, np.inf, 0.0)
    if kind not in _COMMUTATIVE:
        memory.array.radius[cells] = np.where(contested, np.inf, 0.0)
    return IntervalArray(old, radius)


def _update_serially(array: np.ndarray, cells: Any, kind: str, values: Sequence[np.ndarray]) -> tuple[Any, Any]:
    """Apply updates in order; return the old values, and which elements were updated more than once."""
    count = len(values[0])
    old = np.zeros(count, array.dtype)
    places = np.ravel_multi_index(cells, array.shape) if cells else np.zeros(count, np.int64)
    for lanes in _serialise_conflicts(places):
        at = tuple(c[lanes] for c in cells)
        old[lanes] = array[at]
        array[at] = ATOMIC_FUNCTIONS[kind](old[lanes], *(v[lanes] for v in values))
    _, inverse, counts = np.unique(places, return_inverse=True, return_counts=True)
    return old, counts[inverse.reshape(-1)] > 1


def _serialise_conflicts(places: np.ndarray) -> Iterator[np.ndarray]:
    """Split updates into batches of distinct elements, in order."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)]
    starts = np.flatnonzero(first)
    turn = np.arange(len(places)) - np.repeat(starts, np.diff(np.r_[starts, len(places)]))
    by_turn = np.argsort(turn, kind="stable")
    return iter(np.split(order[by_turn], np.flatnonzero(np.diff(turn[by_turn])) + 1))


def _add_with_bounds(
    memory: InstanceMemory, dtype: DType, cells: Any, values: IntervalArray, old: np.ndarray, chosen: np.ndarray
) -> IntervalArray:
    """Bound atomic float additions: n of them in any order differ by at most γ(n) times the sum of magnitudes.

    The old value is known only where no other update has the same element.
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
    form = find_rounding_model(dtype)
    factor = np.array([gamma(n, form.unit) for n in range(int(count.max(initial=0)) + 1)])[count]
    known[...] = np.where(count > 0, spread + factor * size + count * form.tiny, known)
    radius = np.zeros(old.shape)
    contested = count[cells] > 1
    old[chosen], radius[chosen] = before[0], np.where(contested, np.inf, before[1])
    return IntervalArray(old, radius)


# row(node, rank) returns a function of an array with `rank` leading instance axes.
view_rules = Rules("tile moves")

FULL_SLICE = slice(None)


@view_rules(basic.broadcast_to)
def _(node, rank):
    # Broadcast axes stay at size 1: NumPy expands them where needed.
    new = (None,) * (len(node.attrs["shape"]) - node.args[0].type.rank)
    return itemgetter((FULL_SLICE,) * rank + new) if new else identity_view


@view_rules(shape.permute)
def _(node, rank):
    return methodcaller("transpose", *range(rank), *(a + rank for a in node.attrs["axes"]))


@view_rules(shape.reshape)
def _(node, rank):
    before, after = node.args[0].type.shape, node.attrs["shape"]
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return lambda array: expand_block(array, before).reshape(*array.shape[:rank], *after)
    return itemgetter((FULL_SLICE,) * rank + _reshape_unit_axes(before, after))


def identity_view(array: Any) -> Any:
    """Return an array unchanged."""
    return array


def _reshape_unit_axes(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Any, ...]:
    """Make the subscript that removes and inserts axes of size 1."""
    places: list[Any] = []
    sizes = iter(before)
    for wanted in after:
        if wanted == 1:
            places.append(None)
        else:
            size = next(sizes)
            while size == 1:
                places.append(0)
                size = next(sizes)
            places.append(FULL_SLICE)
    return (*places, *(0 for _ in sizes))


def expand_block(array: Any, block: tuple[int, ...]) -> Any:
    """Expand the block axes of a value from size 1 to full size."""
    sizes, lead = array.shape, array.ndim - len(block)
    return array if sizes[lead:] == block else np.broadcast_to(array, (*sizes[:lead], *block))
