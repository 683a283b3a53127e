"""Memory pools: memory allocated once from the system or a device and reused; arenas with coalesced free
blocks, and fixed-size buffers."""

from __future__ import annotations

import bisect
import functools
import math
import mmap
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from tessera.core.device import find_generator_name, shares_host_memory
from tessera.core.errors import ArgumentError, ResourceError, ShapeError, user_location
from tessera.core.kept_memory import has_own_memory
from tessera.core.types import DType, as_dtype, f32
from tessera.ir.tensor import POOL_PLACEMENT, Tensor
from tessera.runtime.storage.memory_spaces import Resident

# Arena: one stretch of memory, parted into blocks; what is free merges with its neighbours.


CACHE_LINE = 64  # a cache line


class HostArena:
    """Memory of the system, taken at once and touched only as it is used; offsets of blocks count from its start.

    >>> arena = HostArena(256)
    >>> a, b = arena.take(100), arena.take(64)
    >>> a, b, arena.free
    (0, 128, 64)
    >>> arena.give_back(0), arena.give_back(128), arena.holes
    (None, None, [(0, 256)])
    """

    def __init__(self, size: int) -> None:
        self.size = round_to_cache_lines(size)
        self.memory = memoryview(mmap.mmap(-1, self.size))
        self.start = int(np.frombuffer(self.memory, np.uint8).ctypes.data)  # its address
        self.holes: list[tuple[int, int]] = [(0, self.size)]  # (offset, size), in order, never touching
        self.blocks: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Bytes in no block."""
        return sum(size for _, size in self.holes)

    def take(self, size: int) -> int | None:
        """The offset of a new block in the smallest hole that has room; None where none has."""
        size = round_to_cache_lines(size)
        found = min((h for h in self.holes if h[1] >= size), key=lambda h: h[1], default=None)
        if found is None:
            return None
        place = self.holes.index(found)
        offset, room = found
        self.holes[place : place + 1] = [(offset + size, room - size)] if room > size else []
        self.blocks[offset] = size
        return offset

    def give_back(self, offset: int) -> None:
        """End a block; its memory joins the free memory on both sides."""
        size = self.blocks.pop(offset)
        place = bisect.bisect(self.holes, (offset, 0))
        start, end, first, last = offset, offset + size, place, place
        if place and sum(self.holes[place - 1]) == offset:
            start, first = self.holes[place - 1][0], place - 1
        if place < len(self.holes) and self.holes[place][0] == end:
            end, last = sum(self.holes[place]), place + 1
        self.holes[first:last] = [(start, end - start)]


def round_to_cache_lines(size: int) -> int:
    """A size as blocks have it: whole cache lines, at least one."""
    return max(-(-size // CACHE_LINE), 1) * CACHE_LINE


_SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_UNIT_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def as_bytes(size: int | str) -> int:
    """A count of bytes: an int, or text with K, M, G or T (powers of 1024), with or without B.

    Raises:
        ArgumentError: this is no size.

    >>> as_bytes("8GB") == 8 * 1024**3, as_bytes("1.5K"), as_bytes(64)
    (True, 1536, 64)
    """
    if type(size) is int and size >= 0:
        return size
    found = _SIZE_PATTERN.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is None:
        raise ArgumentError(
            f"{size!r} is no size of memory", location=user_location(), expected='bytes, or text such as "8GB"'
        )
    return int(float(found[1]) * 1024 ** _UNIT_POWERS[found[2].upper()])


@dataclass(frozen=True)
class PoolReport:
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
            raise ArgumentError(
                f"a pool cannot grow by the factor {growth_factor}", location=user_location(), expected=">= 1.0"
            )
        self.size, self.growth_factor = as_bytes(size), growth_factor
        self.device = device or "cpu"
        find_generator_name(self.device)
        self.on_host = shares_host_memory(self.device)
        self._arenas = [_make_arena(self.size)] if self.on_host else []
        self._lock = Lock()
        self._ended: deque[tuple[HostArena | None, int]] = deque()  # blocks nothing refers to: a finalizer may not lock
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
        if not array.ndim or not (has_own_memory(array) or constant):
            return array
        held = self._array(array.shape, array.dtype)
        np.copyto(held, array)
        return held

    def has(self, array: np.ndarray) -> bool:
        """Whether an array's elements lie in this pool."""
        place = array.__array_interface__["data"][0]
        with self._lock:
            return any(a.start <= place < a.start + a.size for a in self._arenas)

    def report(self) -> PoolReport:
        """What the pool holds now."""
        with self._lock:
            self._collect()
            largest = max((size for a in self._arenas for _, size in a.holes), default=self._capacity - self._used)
            return PoolReport(self._capacity, self._used, self._peak, largest, self._count)

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
            self._note(round_to_cache_lines(size))
        held = _PoolBlock(arena.memory[offset : offset + round_to_cache_lines(size)])
        weakref.finalize(held, self._ended.append, (arena, offset)).atexit = False
        return held

    def _placed(self, size: int) -> tuple[HostArena, int]:
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
        more = max(int(self._capacity * (self.growth_factor - 1)), round_to_cache_lines(size))
        self._arenas.append(_make_arena(more))
        self._capacity += self._arenas[-1].size

    def _full(self, size: int) -> ResourceError:
        free = self._capacity - self._used
        return ResourceError(
            f"the pool of {self._capacity:,} bytes is full", location=user_location(),
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


def _make_arena(size: int) -> HostArena:
    try:
        return HostArena(size)
    except (OSError, ValueError, OverflowError) as error:
        raise ResourceError(f"the system gives no {size:,} bytes: {error}", location=user_location()) from None


class _PoolBlock:
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
            f"tensors lie in host memory, this pool in that of {pool.device}", location=user_location(),
            suggestion="pool.empty(shape, dtype) gives arrays there",
        )  # fmt: skip
    token = POOL_PLACEMENT.set(pool.hold)
    try:
        yield pool
    finally:
        POOL_PLACEMENT.reset(token)


F = TypeVar("F", bound=Callable[..., Any])
_INITIAL_SIZE = "1MB"  # what a function's own pool begins with


class MemoryBuffer:
    """Memory of a fixed size: `allocate` gives tensors in it, `reuse` another tensor in the place of one."""

    def __init__(self, size: int | str) -> None:
        self.pool = Pool(size, growth_factor=1.0)

    def allocate(self, shape: int | Sequence[int], dtype: DType | str = f32) -> Tensor:
        """A tensor of zeros in this buffer.

        Raises:
            ResourceError: the buffer is full.
        """
        held = self.pool.empty(shape, dtype)
        held[...] = 0
        return Tensor(held)

    def reuse(self, x: Tensor, shape: int | Sequence[int] | None = None, dtype: DType | str | None = None) -> Tensor:
        """A tensor in the place of `x`, by default of its shape and type: what one holds the other holds.

        Raises:
            ArgumentError: `x` does not lie in this buffer, or not in one piece.
            ShapeError: there is not as much room.
        """
        held = x.numpy()
        if not self.pool.has(held) or not held.flags.c_contiguous:
            raise ArgumentError(
                "this tensor lies in no piece of the buffer", location=user_location(), expected="one it allocated"
            )
        element = as_dtype(x.dtype if dtype is None else dtype)
        sizes = x.shape if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
        count = math.prod(int(n) for n in sizes) * element.numpy.itemsize
        if count > held.nbytes:
            raise ShapeError(
                "the tensor in whose place this is to lie is smaller", location=user_location(),
                expected=f"{held.nbytes:,} bytes", received=f"{count:,} bytes",
            )  # fmt: skip
        return Tensor(held.reshape(-1).view(np.uint8)[:count].view(element.numpy).reshape(sizes))


@contextmanager
def buffer(size: int | str) -> Iterator[MemoryBuffer]:
    """A buffer for the body of a `with`; its memory goes when its last tensor does.

    >>> with buffer("1KB") as buf:
    ...     first = buf.allocate((4,))
    ...     second = buf.reuse(first)
    >>> second.numpy()[:] = 3.0
    >>> first
    Tensor([3., 3., 3., 3.], f32)
    """
    as_bytes(size)
    yield MemoryBuffer(size)


def reuse(function: F) -> F:
    """A function whose tensors lie in a pool of its own, so that each call uses the memory that the last one left.

    >>> @reuse
    ... def doubled(x):
    ...     return x + x
    >>> doubled(Tensor([1.0, 2.0]))
    Tensor([2., 4.], f32)
    """
    pool: list[Pool] = []

    @functools.wraps(function)
    def pooled(*args: Any, **named: Any) -> Any:
        if not pool:
            pool.append(Pool(_INITIAL_SIZE))
        with use_pool(pool[0]):
            return function(*args, **named)

    return pooled  # type: ignore[return-value]
