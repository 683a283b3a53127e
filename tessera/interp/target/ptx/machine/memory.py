"""State spaces as flat arrays: one arena for global memory, shared memory by CTA and local memory by lane; the fault of
an instruction that executes.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from tessera.core.errors import ExecutionError, OutOfBoundsError, TesseraError

# Fault: the exception of an executing instruction, raised before its location is known.


class PtxFault(Exception):
    """A fault of an instruction: its message, the error it becomes, and the faulting lane."""

    def __init__(self, message: str, kind: type[TesseraError] = ExecutionError, lane: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.lane = lane


# State spaces as flat arrays: one arena for global memory, shared memory by CTA and local memory by lane.


# the base of each space's window in generic addresses
GENERIC_WINDOWS = {"shared": 1 << 40, "local": 2 << 40, "global": 3 << 40}
WINDOW_BITS = 40
# the bits of a shared::cluster address above these are 1 + the rank of the CTA, or 0 for the own CTA
CTA_RANK_SHIFT = 24
NEAR = 1 << 16  # an address up to so many bytes past an allocation is said to be past it
_GUARD = 256  # unmapped bytes between segments, so that an access out of bounds is detected


class FlatMemory:
    """Bytes, viewed as elements of any size."""

    def __init__(self, size: int) -> None:
        self.raw = np.zeros(-(-size // 16) * 16 + 16, np.uint8)
        self.views = {n: self.raw.view(f"u{n}") for n in (1, 2, 4, 8)}


class GlobalArena:
    """Named segments of global memory, allocated as one array before the launch."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.names: list[str] = []
        self.spaces: list[str] = []
        self.top = _GUARD
        self.flat = FlatMemory(0)
        self.objects: list[tuple[Any, int]] = []  # textures, samplers and surfaces, and where their arrays start
        self.host: list[tuple[int, int, int]] = []  # ranges of host addresses, and where their segments start

    def add(self, name: str, size: int, space: str = "global") -> int:
        """Reserve a segment; its offset."""
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

    def write_bytes(self, start: int, content: bytes) -> None:
        """Write bytes at an offset."""
        self.flat.raw[start : start + len(content)] = np.frombuffer(content, np.uint8)

    def find_out_of_bounds(self, offsets: np.ndarray, size: int) -> int:
        """The position of the first access that is not within one segment, or -1."""
        if not self.starts:
            return 0
        low, high = int(offsets.min()), int(offsets.max())
        index = bisect_right(self.starts, low) - 1
        if index >= 0 and high + size <= self.ends[index]:
            return -1
        owners = np.searchsorted(self.starts, offsets, "right") - 1
        bad = (owners < 0) | (offsets + size > np.array(self.ends)[owners])
        return int(np.argmax(bad)) if bad.any() else -1

    def translate(self, address: np.ndarray, size: int) -> np.ndarray | None:
        """The offsets of addresses of the host, which programs keep in memory; None unless all are in a segment."""
        offsets = (address - np.uint64(GENERIC_WINDOWS["global"])).view(np.int64)
        for low, high, start in self.host:
            here = (address >= np.uint64(low)) & (address < np.uint64(high))
            offsets = np.where(here, address.view(np.int64) - low + start, offsets)
        return None if not self.host or self.find_out_of_bounds(offsets, size) >= 0 else offsets

    def is_in_space(self, space: str, offsets: np.ndarray) -> np.ndarray:
        """Whether offsets are in segments of a space."""
        owners = np.searchsorted(self.starts, offsets, "right") - 1
        there = np.array([s == space for s in self.spaces])[owners]
        return there & (owners >= 0) & (offsets < np.array(self.ends)[owners])

    def describe(self, offset: int) -> str:
        """An offset in words, for errors."""
        if offset < 0 or offset >= self.top or not self.starts:
            address = offset + GENERIC_WINDOWS["global"]
            past = [(address - high, low) for low, high, _ in self.host if 0 <= address - high < NEAR]
            after = f" ({min(past)[0]} bytes past the end of the allocation at {min(past)[1]:#x})" if past else ""
            return f"address {address:#x}{after} is in no argument"
        index = max(bisect_right(self.starts, offset) - 1, 0)
        size = self.ends[index] - self.starts[index]
        return f"byte {offset - self.starts[index]} of {self.names[index]}, which has {size} bytes"


def find_misaligned(address: np.ndarray, size: int) -> int:
    """The position of the first misaligned address, or -1."""
    if size == 1 or not int(np.bitwise_or.reduce(address, axis=None)) & (size - 1):
        return -1
    return int(np.argmax(address & np.uint64(size - 1) != 0))


def make_alignment_fault(address: np.ndarray, position: int, size: int, lane: int) -> PtxFault:
    """The fault of a misaligned access."""
    where = int(address.reshape(-1)[position])
    return PtxFault(f"misaligned access of {size} bytes at {where:#x}", OutOfBoundsError, lane)
