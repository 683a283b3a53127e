"""A piece of memory with a name, and the faults of accesses that miss it.

An address is a segment number above bit 36 and an offset from the middle of that segment's slot, so that an
offset may stray by gigabytes either way and the error still names the right segment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tessera.errors import OutOfBoundsError
from tessera.interp.target.llvm.access import Access
from tessera.interp.target.llvm.fault import Fault

_SLOT = 36
_MIDDLE = 1 << (_SLOT - 1)
_NULL_PAGE = 4096


def base_address(number: int) -> int:
    """Where segment `number` begins."""
    return (number << _SLOT) + _MIDDLE


def segment_number(address: int) -> int:
    """The segment that an address belongs to."""
    return address >> _SLOT


@dataclass
class Segment:
    """Bytes with a name; `stride` apart lie `size` bytes for each lane."""

    name: str
    base: int
    data: np.ndarray
    size: int
    stride: int = 1 << _SLOT
    writable: bool = True
    views: dict[np.dtype, np.ndarray] = field(default_factory=dict)

    def view(self, dtype: np.dtype) -> np.ndarray:
        """The bytes as elements of a type."""
        found = self.views.get(dtype)
        if found is None:
            whole = len(self.data) // dtype.itemsize * dtype.itemsize
            found = self.views[dtype] = self.data[:whole].view(dtype)
        return found

    def at(self, place: int, access: Access, verb: str) -> int:
        """The offset of one address, checked."""
        offset = place - self.base
        inside = 0 <= offset <= len(self.data) - access.size
        if not inside or offset % self.stride + access.size > self.size:
            raise self._outside(offset, access, verb)
        self._check(offset, access, verb)
        return offset

    def at_each(self, places: np.ndarray, access: Access, verb: str) -> np.ndarray:
        """The offsets of many addresses, checked."""
        offset = places - self.base
        bad = offset % self.stride > self.size - access.size
        if bad.any() or offset.min() < 0 or offset.max() + access.size > len(self.data):
            bad |= (offset < 0) | (offset + access.size > len(self.data))
            lane = int(bad.argmax())
            raise self._outside(int(offset[lane]), access, verb, lane)
        if int(np.bitwise_or.reduce(offset)) & (access.align - 1):
            lane = int((offset & (access.align - 1)).argmax())
            self._check(int(offset[lane]), access, verb, lane)
        self._check(0, access, verb)
        return offset

    def _check(self, offset: int, access: Access, verb: str, lane: int | None = None) -> None:
        if offset & (access.align - 1):
            what = f"misaligned {verb} (align {access.align}) at offset {offset} of {self.name}"
            raise Fault(what, lane=lane)
        if not self.writable and not verb.endswith("load"):
            raise Fault(f"{verb} to {self.name}, which is read-only")

    def _outside(self, offset: int, access: Access, verb: str, lane: int | None = None) -> Fault:
        if 0 <= offset < len(self.data):
            offset %= self.stride
        found = f"{verb} of {access.size} bytes at offset {offset} of {self.name} ({self.size} bytes)"
        return Fault(found, OutOfBoundsError, lane)


def nowhere(place: int, access: Access, verb: str, lane: int | None = None) -> Fault:
    """An address that belongs to no segment."""
    what = "a null pointer" if abs(place) < _NULL_PAGE else f"address {place:#x}, where nothing lives"
    return Fault(f"{verb} of {access.size} bytes at {what}", OutOfBoundsError, lane)
