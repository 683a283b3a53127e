"""Pool: memory taken once from the system or a device, and handed out again and again."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from tessera.device import generator_of, on_host
from tessera.errors import ArgumentError, ResourceError, here
from tessera.storage.arena import Arena, rounded
from tessera.storage.resident import Resident
from tessera.storage.sizes import as_bytes
from tessera.tensor import OWNER
from tessera.types import DType, as_dtype, f32


@dataclass(frozen=True)
class Report:
    """What a pool holds, in bytes: taken from the system, in blocks now and at most, and the largest free stretch."""

    capacity: int
    used: int
    peak: int
    largest_free: int
    allocations: int


class Pool:
    """Memory for tensors: `size` at first; where it does not suffice it grows to `growth_factor` times what it has.

    Blocks are whole cache lines. One that nothing refers to any more (a tensor, or a view of it) is free again, and
    merges with its free neighbours; live tensors never move, as others may hold views of them. On a device of its
    own memory ("cuda:0") the pool counts and limits what is taken there, and `empty` gives `Resident` arrays.

    Raises:
        ArgumentError: this is no size, or the factor is below 1.
        DeviceUnavailable: there is no such device.

    >>> pool = Pool("64KB", growth_factor=1.0)
    >>> x = pool.empty((32, 32))
    >>> pool.report().used, x.shape
    (4096, (32, 32))
    >>> del x
    >>> pool.report().used
    0
    """

    def __init__(self, size: int | str = "64MB", device: str | None = None, growth_factor: float = 1.5) -> None:
        if growth_factor < 1.0:
            raise ArgumentError(f"a pool cannot grow by the factor {growth_factor}", location=here(), expected=">= 1.0")
        self.size, self.growth_factor = as_bytes(size), growth_factor
        self.device = device or "cpu"
        generator_of(self.device)
        self.on_host = on_host(self.device)
        self._arenas = [_arena(self.size)] if self.on_host else []
        self._lock = Lock()
        self._ended: deque[tuple[Arena | None, int]] = deque()  # blocks nothing refers to: a finalizer may not lock
        self._capacity = self._arenas[0].size if self._arenas else self.size
        self._used = self._peak = self._count = 0

    def empty(self, shape: int | Sequence[int], dtype: DType | str = f32) -> Any:
        """Memory for an array: a NumPy array in this pool, or a Resident on a device; what it holds means nothing.

        Raises:
            ResourceError: the pool is full and does not grow, or the system has no more.
        """
        listed = (shape,) if isinstance(shape, int) else tuple(shape)
        element = as_dtype(dtype)
        if not self.on_host:
            return self._resident(listed, element, int(np.prod(listed, dtype=np.int64)) * element.numpy.itemsize)
        return self._array(listed, element.numpy)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return np.asarray(self._block(size))[:size].view(dtype).reshape(shape)

    def hold(self, array: np.ndarray) -> np.ndarray:
        """An array's elements in this pool; a view of another array stays what it is.

        Constants, which are views of one element elsewhere, get memory here.
        """
        constant = isinstance(array.base, np.ndarray) and array.base.size == 1 and not array.flags.writeable
        if not array.ndim or not (array.flags.owndata or constant):
            return array
        held = self._array(array.shape, array.dtype)
        np.copyto(held, array)
        return held

    def has(self, array: np.ndarray) -> bool:
        """Whether an array's elements lie in this pool."""
        place = array.__array_interface__["data"][0]
        with self._lock:
            return any(a.start <= place < a.start + a.size for a in self._arenas)

    def report(self) -> Report:
        """What the pool holds now."""
        with self._lock:
            self._collect()
            largest = max((size for a in self._arenas for _, size in a.holes), default=self._capacity - self._used)
            return Report(self._capacity, self._used, self._peak, largest, self._count)

    def defragment(self) -> int:
        """Give stretches that hold no block back to the system, but for the first; the bytes given back.

        Free neighbours are merged as they arise, with nothing to be asked for.
        """
        with self._lock:
            self._collect()
            empty = [a for a in self._arenas[1:] if not a.blocks]
            self._arenas = [a for a in self._arenas if a not in empty]
            self._capacity -= sum(a.size for a in empty)
            return sum(a.size for a in empty)

    def _block(self, size: int) -> Any:
        """The bytes of a new block, which comes back when the last array over them is gone."""
        with self._lock:
            self._collect()
            arena, offset = self._placed(size)
            self._note(rounded(size))
        held = _Block(arena.memory[offset : offset + rounded(size)])
        weakref.finalize(held, self._ended.append, (arena, offset)).atexit = False
        return held

    def _placed(self, size: int) -> tuple[Arena, int]:
        for arena in self._arenas:
            if (offset := arena.take(size)) is not None:
                return arena, offset
        self._grow(size)
        offset = self._arenas[-1].take(size)
        assert offset is not None
        return self._arenas[-1], offset

    def _grow(self, size: int) -> None:
        if self.growth_factor == 1.0:
            raise self._full(size)
        more = max(int(self._capacity * (self.growth_factor - 1)), rounded(size))
        self._arenas.append(_arena(more))
        self._capacity += self._arenas[-1].size

    def _full(self, size: int) -> ResourceError:
        free = self._capacity - self._used
        return ResourceError(
            f"the pool of {self._capacity:,} bytes is full", location=here(),
            expected="less, or growth_factor above 1", received=f"{size:,} more bytes, {free:,} free",
            suggestion="drop tensors that are no longer needed, or Pool(size=...)",
        )  # fmt: skip

    def _note(self, size: int) -> None:
        self._used += size
        self._count += 1
        self._peak = max(self._peak, self._used)

    def _collect(self) -> None:
        while self._ended:
            arena, place = self._ended.popleft()
            if arena is None:
                self._used -= place
            else:
                self._used -= arena.blocks[place]
                arena.give_back(place)

    def _resident(self, shape: tuple[int, ...], element: DType, size: int) -> Resident:
        with self._lock:
            self._collect()
            if self._used + size > self._capacity:
                if self.growth_factor == 1.0:
                    raise self._full(size)
                self._capacity = max(int(self._capacity * self.growth_factor), self._used + size)
            made = Resident.empty(shape, element, self.device)
            self._note(size)
        weakref.finalize(made, self._ended.append, (None, size)).atexit = False
        return made


def _arena(size: int) -> Arena:
    try:
        return Arena(size)
    except (OSError, ValueError, OverflowError) as error:
        raise ResourceError(f"the system gives no {size:,} bytes: {error}", location=here()) from None


class _Block:
    """Bytes of an arena under an owner of their own: arrays over it, and views of those, keep it alive."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        start = np.frombuffer(memory, np.uint8).ctypes.data
        self.__array_interface__ = {"shape": (len(memory),), "typestr": "|u1", "data": (start, False), "version": 3}


@contextmanager
def use_pool(pool: Pool) -> Iterator[Pool]:
    """In this block the elements of new tensors lie in a pool: of those made, and of what operations give.

    NumPy computes a result in memory of its own; it is then moved. Views, scalars and traced values are not.

    Raises:
        ArgumentError: the pool is of a device's memory, where tensors do not lie.
    """
    if not pool.on_host:
        raise ArgumentError(
            f"tensors lie in host memory, this pool in that of {pool.device}", location=here(),
            suggestion="pool.empty(shape, dtype) gives arrays there",
        )  # fmt: skip
    token = OWNER.set(pool.hold)
    try:
        yield pool
    finally:
        OWNER.reset(token)
