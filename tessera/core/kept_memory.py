"""Memory of large results: kept when an array ends, for the next one of about its size (a caching allocator).

Pages that the system gives are zeroed when they are first touched, which takes longer than many a function that fills
them. The C library gives arrays of some megabytes back to the system, or not, by what was freed before.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any

import numpy as np

from tessera.core.device import array_address

LEAST_BYTES = 1 << 20  # smaller arrays stay in the heap of the C library: keeping one takes 3 µs
MAX_KEPT_BYTES = 1 << 28  # of memory that no array uses
ALIGNMENT = 64  # a cache line
SIZES_OF_A_POWER = 8  # sizes are rounded up to this many between two powers of two


class ArrayMemory(ctypes.Array):  # type: ignore[type-arg]
    """The memory of one array, which refers to it alone; it comes back when the array and its views are gone."""

    _type_, _length_ = ctypes.c_char, 0
    memory: np.ndarray

    def __del__(self) -> None:
        memory = getattr(self, "memory", None)
        if memory is not None:
            KEPT.give_back(memory)


@cache
def _make_memory_type(size: int) -> type[ArrayMemory]:
    return type("ArrayMemory", (ArrayMemory,), {"_length_": size})


class KeptMemory:
    """Memory that no array uses, by size; what was kept longest is dropped first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self._free: OrderedDict[int, np.ndarray] = OrderedDict()  # by the identity of the array of bytes
        self._by_size: dict[int, list[int]] = {}
        self._lock = Lock()

    def take(self, size: int) -> np.ndarray:
        """Bytes, of which so many follow the first address that is a multiple of `ALIGNMENT`."""
        size = round_size(size) + ALIGNMENT
        with self._lock:
            found = self._by_size.get(size)
            if found:
                self.held -= size
                return self._free.pop(found.pop())
        return np.empty(size, np.uint8)

    def give_back(self, memory: np.ndarray) -> None:
        """Keep memory that no array uses any more, unless another thread is here: a finalizer must not wait."""
        if memory.nbytes > self.limit // 2 or not self._lock.acquire(blocking=False):
            return
        try:
            self._free[id(memory)] = memory
            self._by_size.setdefault(memory.nbytes, []).append(id(memory))
            self.held += memory.nbytes
            while self.held > self.limit:
                key, oldest = self._free.popitem(last=False)
                self._by_size[oldest.nbytes].remove(key)
                self.held -= oldest.nbytes
        finally:
            self._lock.release()

    def clear(self) -> None:
        """Give what no array uses back to the system."""
        with self._lock:
            self._free.clear()
            self._by_size.clear()
            self.held = 0


KEPT = KeptMemory(MAX_KEPT_BYTES)


def round_size(size: int) -> int:
    """A size rounded up to one of eight between two powers of two.

    >>> round_size(1 << 20) == 1 << 20, round_size((1 << 20) + 1) == 9 << 17
    (True, True)
    """
    step = max((1 << size.bit_length() - 1) // SIZES_OF_A_POWER, 1)
    return -(-size // step) * step


def make_array(shape: Sequence[int], dtype: np.dtype, size: int) -> np.ndarray:
    """An array of so many bytes whose elements mean nothing yet; a large one in memory that another one used."""
    if size < LEAST_BYTES:
        return np.empty(shape, dtype)
    memory = KEPT.take(size)
    start = -array_address(memory) % ALIGNMENT
    block = _make_memory_type(memory.nbytes - ALIGNMENT).from_buffer(memory, start)  # type: ignore[arg-type]
    block.memory = memory
    return np.ndarray(shape, dtype, block)  # type: ignore[arg-type]


def has_own_memory(array: Any) -> bool:
    """Whether an array is no view of another one."""
    return array.base is None or isinstance(array.base, ArrayMemory)
