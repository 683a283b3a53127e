"""Arena: one stretch of memory, parted into blocks; what is free merges with its neighbours."""

from __future__ import annotations

import bisect
import mmap

import numpy as np

ALIGN = 64  # a cache line


class Arena:
    """Memory of the system, taken at once and touched only as it is used; offsets of blocks count from its start.

    >>> arena = Arena(256)
    >>> a, b = arena.take(100), arena.take(64)
    >>> a, b, arena.free
    (0, 128, 64)
    >>> arena.give_back(0), arena.give_back(128), arena.holes
    (None, None, [(0, 256)])
    """

    def __init__(self, size: int) -> None:
        self.size = rounded(size)
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
        size = rounded(size)
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


def rounded(size: int) -> int:
    """A size as blocks have it: whole cache lines, at least one."""
    return max(-(-size // ALIGN), 1) * ALIGN
