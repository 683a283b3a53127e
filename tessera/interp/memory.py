"""Memory as the Tile interpreter sees it: blocks read and written for all program instances at once.

Every array of values has leading *instance* axes (one for each grid axis, and one for the tiles of a
group where there are several), each of its full size or 1, and then the axes of the block, likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from tessera.errors import OutOfBoundsError
from tessera.interp.affine import Affine
from tessera.numerics.bounded import Bounded, lift


@dataclass
class Memory:
    """What a ref names: an array, whose first `lead` axes (if any) are the instances' own copies."""

    array: Any  # a NumPy array, or a Bounded in bound mode
    name: str
    lead: int = 0
    written: bool = True  # whether the kernel writes here: if not, reads need no copy
    shape: tuple[int, ...] = field(init=False)  # of one copy

    def __post_init__(self) -> None:
        self.shape = self.array.shape[self.lead :]

    def view(self, starts: Sequence[Any], block: tuple[int, ...], count: tuple[int, ...]) -> np.ndarray | None:
        """All instances' blocks at affine starts as one strided view.

        None where a start is an array, a block reaches outside, or the memory is a Bounded: `Place` says what then.
        """
        array, lead = self.array, self.lead
        if type(array) is not np.ndarray:
            return None
        strides, shape = array.strides, array.shape
        steps, origin = [0] * len(count), 0
        for axis in range(lead):
            steps[axis] = strides[axis] if shape[axis] > 1 else 0
        for start, length, size, stride in zip(starts, block, self.shape, strides[lead:], strict=True):
            if type(start) is not Affine:
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
            origin += start.origin * stride
        sizes = [n if step else 1 for n, step in zip(count, steps, strict=True)]
        return _view(array, origin, (*sizes, *block), (*steps, *strides[lead:]))


@dataclass
class Place:
    """Where blocks lie: their memory, a start for each axis (affine or an array), their shape, and the instances."""

    memory: Memory
    starts: list[Any]
    block: tuple[int, ...]
    count: tuple[int, ...]

    def inside(self) -> bool:
        """Whether every instance's block lies in the memory."""
        for start, length, size in zip(self.starts, self.block, self.memory.shape, strict=True):
            if length and not _fits(start, length, size, self.count):
                return False
        return True

    def window(self) -> Any:
        """All instances' blocks as one strided view, where their starts form arithmetic progressions; else None."""
        array = self.memory.array
        if type(array) is np.ndarray:
            return self._window(array)
        value, radius = self._window(array.value), self._window(array.radius)
        return None if value is None else Bounded(value, radius)

    def _window(self, array: np.ndarray) -> np.ndarray | None:
        lead = self.memory.lead
        strides = array.strides
        steps, origin = [0] * len(self.count), 0
        for axis in range(lead):
            steps[axis] = strides[axis] if array.shape[axis] > 1 else 0
        for start, stride in zip(self.starts, strides[lead:], strict=True):
            found = start if type(start) is Affine else _progression(start)
            if found is None:
                return None
            origin += found.origin * stride
            for axis, step in enumerate(found.steps):
                if step:
                    steps[axis] += step * stride
        shape = [n if step else 1 for n, step in zip(self.count, steps, strict=True)]
        # `inside` has checked the bounds.
        return _view(array, origin, (*shape, *self.block), (*steps, *strides[lead:]))

    def indices(self) -> list[np.ndarray]:
        """An index array for each axis of the memory's array, of instance axes and block axes."""
        rank, depth = len(self.count), len(self.block)
        found = [_along(n, a, rank + depth) for a, n in enumerate(self.memory.array.shape[: self.memory.lead])]
        for axis, (start, n) in enumerate(zip(self.starts, self.block, strict=True)):
            start = start.array(self.count) if isinstance(start, Affine) else start
            found.append(start.reshape(start.shape + (1,) * depth) + _along(n, rank + axis, rank + depth))
        return found


def _fits(start: Any, length: int, size: int, count: tuple[int, ...]) -> bool:
    if type(start) is Affine:
        low, high = start.ends(count)
    elif start.size == 1:
        low = high = start.item()
    else:
        low, high = start.min(), start.max()
    return bool(low >= 0 and high <= size - length)  # the sum of the other two might wrap


def _progression(start: np.ndarray) -> Affine | None:
    """An array of instance axes as an affine scalar, if it is one."""
    origin = int(start.flat[0])
    steps, guess = [0] * start.ndim, np.int64(origin)
    for axis, size in enumerate(start.shape):
        if size > 1:
            second = tuple(1 if a == axis else 0 for a in range(start.ndim))
            steps[axis] = int(start[second]) - origin
            guess = guess + steps[axis] * _along(size, axis, start.ndim)
    return (
        Affine(origin, tuple(steps))
        if start.size == 1 or np.array_equal(np.broadcast_to(guess, start.shape), start)
        else None
    )


def _view(array: np.ndarray, origin: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """A view of an array's memory from `origin` bytes on."""
    builtin = array.dtype.isbuiltin == 1  # the types of ml_dtypes are no buffers: their bytes stand for them
    if array.flags.c_contiguous and array.size:
        raw = array if builtin else array.reshape(-1).view(np.uint8)
        return np.ndarray(shape, array.dtype, raw, origin, strides)
    moved = _offset(array, origin)
    if builtin:
        return as_strided(moved, shape, strides)
    return as_strided(moved.view(f"V{array.itemsize}"), shape, strides).view(array.dtype)


def _offset(array: np.ndarray, count: int) -> np.ndarray:
    """An array that begins `count` bytes later (its shape does not matter to the caller)."""
    if not count:
        return array
    index = []
    for size, stride in zip(array.shape, array.strides, strict=True):
        step = min(count // stride, size - 1) if stride > 0 else 0
        index.append(slice(step, None))
        count -= step * stride
    assert count == 0, "a block starts outside its array"
    return array[tuple(index)]


def _along(size: int, axis: int, rank: int) -> np.ndarray:
    return np.arange(size).reshape((1,) * axis + (size,) + (1,) * (rank - axis - 1))


def expand(array: np.ndarray, depth: int) -> np.ndarray:
    """An array of instance axes with `depth` block axes of size 1 behind."""
    return array.reshape(array.shape + (1,) * depth)


def read(place: Place, mask: np.ndarray | None, other: Any, active: np.ndarray | None, clip: bool) -> Any:
    """The blocks at a place: `other` where the mask is false or, with `clip`, outside the memory."""
    if place.inside():
        data = place.window()
        if data is None:
            data = place.memory.array[tuple(place.indices())]
        elif place.memory.written:
            data = data.copy()
        return data if mask is None else np.where(mask, data, _or_zero(other, data.dtype))
    depth = len(place.block)
    lanes = None if active is None else expand(active, depth)
    indices, valid = checked_indices(place.memory, place.indices(), _both(mask, lanes), clip)
    data = place.memory.array[tuple(indices)]
    keep = _both(mask, valid)
    return data if keep is None else np.where(keep, data, _or_zero(other, data.dtype))


def write(place: Place, value: Any, mask: np.ndarray | None, active: np.ndarray | None, clip: bool) -> None:
    """Write blocks; masked, inactive and (with `clip`) outside elements are left alone."""
    depth = len(place.block)
    lanes = None if active is None else expand(active, depth)
    keep = _both(mask, lanes)
    inside = place.inside()
    if inside and keep is None:
        window = place.window()
        if window is not None:
            window[...] = last(value, window.shape)
            return
    indices = place.indices()
    if not inside:
        indices, valid = checked_indices(place.memory, indices, keep, clip)
        keep = _both(keep, valid)
    scatter_to(place.memory.array, indices, value, keep)


def scatter_to(array: Any, indices: Sequence[np.ndarray], value: Any, keep: np.ndarray | None) -> None:
    """Write elements where `keep` holds."""
    if keep is None:
        shape = np.broadcast_shapes(*(i.shape for i in indices)) if indices else ()
        array[tuple(indices)] = last(value, shape)
        return
    shape = np.broadcast_shapes(keep.shape, value.shape, *(i.shape for i in indices))
    chosen = np.broadcast_to(keep, shape)
    held = np.broadcast_to(value, shape)[chosen]
    if indices:
        array[tuple(np.broadcast_to(i, shape)[chosen] for i in indices)] = held
    elif chosen.any():  # a scalar: the last instance's value stands
        array[...] = held[-1]


def last(value: Any, shape: tuple[int, ...]) -> Any:
    """Where more instances write than there are places, the last one's value stands."""
    if value.shape == shape:
        return value
    index = tuple(slice(-1, None) if n > 1 and m == 1 else slice(None) for n, m in zip(value.shape, shape, strict=True))
    return value[index]


def _both(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _or_zero(other: Any, dtype: np.dtype) -> Any:
    return np.zeros((), dtype) if other is None else other


def checked_indices(
    memory: Memory, indices: list[np.ndarray], wanted: np.ndarray | None, clip: bool = False
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Indices made safe, and which elements lie inside (None for all)."""
    valid: np.ndarray | None = None
    safe = []
    for axis, (index, size) in enumerate(zip(indices, memory.array.shape, strict=True)):
        if index.size and (index.min() < 0 or index.max() >= size):
            good = (index >= 0) & (index < size)
            bad = ~good if wanted is None else ~good & wanted
            if not clip and bad.any():
                raise _outside(memory, axis, np.broadcast_to(index, bad.shape)[bad][0], size, bad)
            valid = good if valid is None else valid & good
            index = np.where(good, index, 0)
        safe.append(index)
    return safe, valid


def _outside(memory: Memory, axis: int, index: int, size: int, bad: np.ndarray) -> OutOfBoundsError:
    error = OutOfBoundsError(
        f"index {int(index)} is outside axis {axis - memory.lead} of {memory.name}, whose size is {size}",
        expected=f"indices from 0 to {size - 1}",
        received=str(int(index)),
        suggestion='guard it with a mask, or give edge="clip" (or other=...) to read past the edge',
    )
    error.lane = tuple(int(i) for i in np.argwhere(bad)[0])
    return error


def allocate(
    lead: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype, name: str, bound: bool, padding: int = 0
) -> Memory:
    """Fresh memory for each instance, filled with what no program should rely on; rows lie `padding` elements apart."""
    rows = (*shape[:-1], shape[-1] + padding) if padding else shape
    array = np.empty((*lead, *rows), dtype)
    array.view(np.uint8)[...] = 0xFF  # NaN in every float format
    array = array[..., : shape[-1]] if padding else array
    return Memory(lift(array) if bound else array, name, len(lead))
