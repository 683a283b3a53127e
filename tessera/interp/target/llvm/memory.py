"""Memory as segments far apart: every access is checked against the one it falls into.

An address is a segment number above bit 36 and an offset from the middle of that segment's slot, so that an
offset may stray by gigabytes either way and the error still names the right segment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import numpy as np

from tessera.errors import ArgumentError, OutOfBoundsError
from tessera.interp.target.llvm.access import Access
from tessera.interp.target.llvm.fault import Fault
from tessera.interp.target.llvm.lanes import Value, widen
from tessera.interp.target.llvm.types import Aggregate, Type

_SLOT = 36
_MIDDLE = 1 << (_SLOT - 1)
_POISON = 0xCB


def base_address(number: int) -> int:
    """Where segment `number` begins."""
    return (number << _SLOT) + _MIDDLE


@dataclass
class Segment:
    """Bytes with a name; `stride` apart lie copies of `size` bytes each, one per lane."""

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

    def holds(self, offset: int, size: int) -> bool:
        """Whether an access lies inside one lane's bytes."""
        inside = 0 <= offset and offset + size <= len(self.data)
        return inside and offset % self.stride + size <= self.size


def _check_array(array: np.ndarray, name: str) -> None:
    if not array.flags.c_contiguous:
        raise ArgumentError(f"argument {name} must be contiguous", received=f"strides {array.strides}")


class Memory:
    """The segments of one call."""

    def __init__(self, first: int = 1) -> None:
        self._segments: dict[int, Segment] = {}
        self._numbers = count(first)
        self._mapped: dict[tuple[int, int], int] = {}

    def add(self, name: str, data: np.ndarray, writable: bool = True, number: int = 0) -> int:
        """Map bytes; their address."""
        number = number or next(self._numbers)
        base = base_address(number)
        self._segments[number] = Segment(name, base, data, len(data), writable=writable)
        return base

    def map(self, name: str, array: np.ndarray) -> int:
        """The address of an argument array, which is used in place; the same array is mapped once."""
        _check_array(array, name)
        key = (array.ctypes.data, array.nbytes)
        if key not in self._mapped:
            data = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
            self._mapped[key] = self.add(f"argument {name}", data, array.flags.writeable)
        return self._mapped[key]

    def allocate(self, name: str, size: int, align: int, lanes: int) -> np.ndarray:
        """Poisoned bytes for each lane; their addresses."""
        number, stride = next(self._numbers), -(-(size + 1) // align) * align
        data = np.full(stride * lanes, _POISON, np.uint8)
        self._segments[number] = Segment(name, base_address(number), data, size, stride)
        return base_address(number) + stride * np.arange(lanes, dtype=np.int64)

    def free(self, address: int) -> None:
        """Forget the segment at an address."""
        del self._segments[address >> _SLOT]

    def load(self, address: np.ndarray, access: Access) -> np.ndarray:
        """The value at one address, or at one address for each lane."""
        raw = self._slice(address, access) if len(address) == 1 else self._gather(address, access)
        return raw if access.decode is None else access.decode(raw)

    def store(self, address: np.ndarray, value: np.ndarray, access: Access) -> None:
        """Write a value for each lane; where lanes share an address the last one's stays."""
        raw = value if access.encode is None else access.encode(value)
        if len(address) == 1:
            target = self._uniform(address, access, "store")
            target[...] = raw[-1]
            return
        for lanes, segment, offset in self._groups(address, access, "store"):
            part = raw if lanes is None or len(raw) == 1 else raw[lanes]
            self._put(segment, offset, part, access)

    def load_type(self, address: np.ndarray, type: Type, access: Access | None, parts: list) -> Value:
        """Load a scalar or vector through its access, an aggregate member by member."""
        if access is not None:
            return self.load(address, access)
        assert isinstance(type, Aggregate)
        return tuple(self.load_type(address + offset, *inner) for offset, inner in parts)

    def _slice(self, address: np.ndarray, access: Access) -> np.ndarray:
        found = self._uniform(address, access, "load").copy()
        return found[None] if access.vector else found

    def _uniform(self, address: np.ndarray, access: Access, verb: str) -> np.ndarray:
        """The memory behind a single address, as the access sees it."""
        place = int(address[0])
        segment = self._segments.get(place >> _SLOT)
        if segment is None:
            raise self._nowhere(place, access, verb)
        offset = place - segment.base
        if not segment.holds(offset, access.size):
            raise self._outside(place, segment, access, verb)
        self._check(segment, place, access, verb)
        if offset & access.low_bits:
            return segment.data[offset : offset + access.size].view(access.dtype)
        first = offset >> access.shift
        return segment.view(access.dtype)[first : first + access.count]

    def _check(self, segment: Segment, place: int, access: Access, verb: str) -> None:
        if place & (access.align - 1):
            found = f"{verb} with align {access.align} at offset {place - segment.base} of {segment.name}"
            raise Fault(f"misaligned {found}")
        if verb != "load" and not segment.writable:
            raise Fault(f"{verb} to {segment.name}, which is read-only")

    def _gather(self, address: np.ndarray, access: Access) -> np.ndarray:
        out = None
        for lanes, segment, offset in self._groups(address, access, "load"):
            found = self._pick(segment, offset, access)
            if lanes is None:
                return found
            if out is None:
                out = np.empty((len(address), *found.shape[1:]), found.dtype)
            out[lanes] = found
        assert out is not None
        return out

    def _groups(self, address: np.ndarray, access: Access, verb: str) -> list:
        """The lanes of each segment with checked offsets; None for all of them together."""
        low, high = int(address.min()), int(address.max())
        if low >> _SLOT == high >> _SLOT:
            return [(None, *self._inside(address, low, high, access, verb, None))]
        slots = address >> _SLOT
        groups = []
        for slot in np.unique(slots):
            lanes = np.flatnonzero(slots == slot)
            part = address[lanes]
            found = self._inside(part, int(part.min()), int(part.max()), access, verb, lanes)
            groups.append((lanes, *found))
        return groups

    def _inside(
        self, address: np.ndarray, low: int, high: int, access: Access, verb: str, lanes: np.ndarray | None
    ) -> tuple[Segment, np.ndarray]:
        segment = self._segments.get(low >> _SLOT)
        if segment is None:
            raise self._nowhere(low, access, verb, _first(address == low, lanes))
        offset = address - segment.base
        bad = (offset % segment.stride) + access.size > segment.size
        if bad.any() or low < segment.base or high + access.size > segment.base + len(segment.data):
            bad |= (offset < 0) | (offset + access.size > len(segment.data))
            lane = int(np.flatnonzero(bad)[0])
            fault = self._outside(int(address[lane]), segment, access, verb)
            fault.lane = lane if lanes is None else int(lanes[lane])
            raise fault
        self._check(segment, int(np.bitwise_or.reduce(offset)) + segment.base, access, verb)
        return segment, offset

    def _pick(self, segment: Segment, offset: np.ndarray, access: Access) -> np.ndarray:
        if access.low_bits and np.bitwise_or.reduce(offset) & access.low_bits:
            raw = segment.data[offset[:, None] + np.arange(access.size)].view(access.dtype)
            return raw if access.vector else raw[:, 0]
        first = offset >> access.shift
        return segment.view(access.dtype)[first[:, None] + np.arange(access.count) if access.vector else first]

    def _put(self, segment: Segment, offset: np.ndarray, value: np.ndarray, access: Access) -> None:
        if access.low_bits and np.bitwise_or.reduce(offset) & access.low_bits:
            value = np.ascontiguousarray(value if access.vector else value[:, None]).view(np.uint8)
            segment.data[offset[:, None] + np.arange(access.size)] = value
            return
        first = offset >> access.shift
        segment.view(access.dtype)[first[:, None] + np.arange(access.count) if access.vector else first] = value

    def _nowhere(self, place: int, access: Access, verb: str, lane: int | None = None) -> Fault:
        what = "a null pointer" if abs(place) < 4096 else f"address {place:#x}, where nothing lives"
        return Fault(f"{verb} of {access.size} bytes at {what}", OutOfBoundsError, lane)

    def _outside(self, place: int, segment: Segment, access: Access, verb: str) -> Fault:
        offset, size = place - segment.base, segment.size
        if 0 <= offset < len(segment.data):
            offset %= segment.stride
        found = f"{verb} of {access.size} bytes at offset {offset} of {segment.name} ({size} bytes)"
        return Fault(found, OutOfBoundsError)

    def atomic(
        self, address: np.ndarray, change: object, access: Access, lanes: int
    ) -> np.ndarray:
        raise NotImplementedError


def _first(found: np.ndarray, lanes: np.ndarray | None) -> int:
    lane = int(np.flatnonzero(found)[0])
    return lane if lanes is None else int(lanes[lane])


__all__ = ["Memory", "Segment", "base_address", "widen"]
