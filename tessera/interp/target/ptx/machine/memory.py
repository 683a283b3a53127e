"""State spaces as flat arrays: one arena for global memory, shared memory by CTA and local memory by lane."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from tessera.core.errors import OutOfBoundsError
from tessera.interp.target.ptx.machine.fault import PtxFault

GENERIC_WINDOWS = {"shared": 1 << 40, "local": 2 << 40, "global": 3 << 40}  # where generic addresses see each space
WINDOW_BITS = 40
CTA_RANK_SHIFT = 24  # a shared::cluster address: 1 + the rank of another CTA above so many bits, 0 for the own one
_GUARD = 256  # unowned bytes between arrays, so that running off one is found


class FlatMemory:
    """Bytes, seen as elements of any size."""

    def __init__(self, size: int) -> None:
        self.raw = np.zeros(-(-size // 16) * 16 + 16, np.uint8)
        self.views = {n: self.raw.view(f"u{n}") for n in (1, 2, 4, 8)}


class GlobalArena:
    """Named segments of global memory, frozen into one array before the launch."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.names: list[str] = []
        self.spaces: list[str] = []
        self.top = _GUARD
        self.flat = FlatMemory(0)

    def add(self, name: str, size: int, space: str = "global") -> int:
        """Reserve a segment of a space; its offset."""
        start = self.top
        self.starts.append(start)
        self.ends.append(start + size)
        self.names.append(name)
        self.spaces.append(space)
        self.top = -(-(start + size) // 256) * 256 + _GUARD
        return start

    def freeze(self) -> None:
        """Allocate the bytes of all segments."""
        self.flat = FlatMemory(self.top)

    def put(self, start: int, content: bytes) -> None:
        """Set bytes."""
        self.flat.raw[start : start + len(content)] = np.frombuffer(content, np.uint8)

    def check(self, offsets: np.ndarray, size: int) -> int:
        """Where an access leaves its segment: the flat position of the first that does, or -1."""
        if not self.starts:
            return 0
        low, high = int(offsets.min()), int(offsets.max())
        index = bisect_right(self.starts, low) - 1
        if index >= 0 and high + size <= self.ends[index]:
            return -1
        owners = np.searchsorted(self.starts, offsets, "right") - 1
        bad = (owners < 0) | (offsets + size > np.array(self.ends)[owners])
        return int(np.argmax(bad)) if bad.any() else -1

    def lies_in(self, space: str, offsets: np.ndarray) -> np.ndarray:
        """Whether offsets belong to segments of a space."""
        owners = np.searchsorted(self.starts, offsets, "right") - 1
        there = np.array([s == space for s in self.spaces])[owners]
        return there & (owners >= 0) & (offsets < np.array(self.ends)[owners])

    def describe(self, offset: int) -> str:
        """An offset in words."""
        if offset < 0 or offset >= self.top or not self.starts:
            return f"address {offset + GENERIC_WINDOWS['global']:#x} belongs to no argument"
        index = max(bisect_right(self.starts, offset) - 1, 0)
        size = self.ends[index] - self.starts[index]
        return f"byte {offset - self.starts[index]} of {self.names[index]}, which has {size} bytes"


def find_misaligned(address: np.ndarray, size: int) -> int:
    """The flat position of the first address that is no multiple of a power of two, or -1."""
    if size == 1 or not int(np.bitwise_or.reduce(address, axis=None)) & (size - 1):
        return -1
    return int(np.argmax(address & np.uint64(size - 1) != 0))


def make_alignment_fault(address: np.ndarray, position: int, size: int, lane: int) -> PtxFault:
    """What is wrong with an address that is no multiple of the access size."""
    where = int(address.reshape(-1)[position])
    return PtxFault(f"misaligned access of {size} bytes at {where:#x}", OutOfBoundsError, lane)
