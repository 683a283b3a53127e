"""The memory of one call: segments far apart, read and written for one lane or for all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np

from tessera.errors import ArgumentError
from tessera.interp.target.llvm.access import Access
from tessera.interp.target.llvm.fault import Fault
from tessera.interp.target.llvm.segment import Segment, base_address, nowhere, segment_number
from tessera.interp.target.llvm.types import round_up

_POISON = 0xCB
_GUARD = 16

# Lanes (None: all of them), where they go and the checked offsets there.
_Group = tuple[np.ndarray | None, Segment, np.ndarray]


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
        if not array.flags.c_contiguous:
            raise ArgumentError(f"argument {name} must be C-contiguous", received=f"strides {array.strides}")
        key = (array.ctypes.data, array.nbytes)
        if key not in self._mapped:
            data = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
            self._mapped[key] = self.add(f"argument {name}", data, array.flags.writeable)
        return self._mapped[key]

    def allocate(self, name: str, size: int, align: int, lanes: int) -> np.ndarray:
        """Poisoned bytes for each lane; their addresses."""
        number, stride = next(self._numbers), round_up(size + _GUARD, max(align, _GUARD))
        data = np.full(stride * lanes, _POISON, np.uint8)
        self._segments[number] = Segment(name, base_address(number), data, size, stride)
        return base_address(number) + stride * np.arange(lanes, dtype=np.int64)

    def bytes(self, address: int, count: int) -> np.ndarray:
        """The bytes from an address on, copied.

        Raises:
            Fault: they do not all lie in one segment.
        """
        segment = self._segments.get(segment_number(address))
        offset = address - segment.base if segment is not None else -1
        if segment is None or not 0 <= offset <= len(segment.data) - count:
            raise Fault(f"{count} bytes at {address:#x} lie outside all memory")
        return segment.data[offset : offset + count].copy()

    def free(self, address: int) -> None:
        """Forget the segment at an address."""
        del self._segments[segment_number(address)]

    def load(self, address: np.ndarray, access: Access, verb: str = "load") -> np.ndarray:
        """The value at one address, or at one address for each lane."""
        if len(address) == 1:
            found = self._uniform(address, access, verb).copy()
            raw = found[None] if access.vector else found
        else:
            raw = self._gather(address, access, verb)
        return raw if access.decode is None else access.decode(raw)

    def store(self, address: np.ndarray, value: np.ndarray, access: Access, verb: str = "store") -> None:
        """Write a value for each lane; where lanes share an address the last one's stays."""
        raw = value if access.encode is None else access.encode(value)
        if len(address) == 1:
            self._uniform(address, access, verb)[...] = raw[-1]
            return
        for lanes, segment, offset in self._groups(address, access, verb):
            _put(segment, offset, raw if lanes is None or len(raw) == 1 else raw[lanes], access)

    def _uniform(self, address: np.ndarray, access: Access, verb: str) -> np.ndarray:
        """The memory behind a single address, as the access sees it."""
        place = int(address[0])
        segment = self._segments.get(segment_number(place))
        if segment is None:
            raise nowhere(place, access, verb)
        offset = segment.at(place, access, verb)
        if offset & access.low_bits:
            return segment.data[offset : offset + access.size].view(access.dtype)
        first = offset >> access.shift
        return segment.view(access.dtype)[first : first + access.count]

    def _gather(self, address: np.ndarray, access: Access, verb: str) -> np.ndarray:
        shape = (len(address), access.count) if access.vector else (len(address),)
        out = np.empty(shape, access.dtype)
        for lanes, segment, offset in self._groups(address, access, verb):
            out[slice(None) if lanes is None else lanes] = _pick(segment, offset, access)
        return out

    def _groups(self, address: np.ndarray, access: Access, verb: str) -> Iterator[_Group]:
        """The lanes by segment; all are checked before the first is used."""
        if not len(address):
            return iter(())
        low, high = int(address.min()), int(address.max())
        if segment_number(low) == segment_number(high):
            return iter([self._group(address, None, access, verb)])
        numbers = segment_number(address)  # type: ignore[arg-type]
        sets = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
        return iter([self._group(address[lanes], lanes, access, verb) for lanes in sets])

    def _group(self, address: np.ndarray, lanes: np.ndarray | None, access: Access, verb: str) -> _Group:
        try:
            segment = self._segments.get(segment_number(int(address[0])))
            if segment is None:
                raise nowhere(int(address[0]), access, verb, 0)
            return lanes, segment, segment.at_each(address, access, verb)
        except Fault as fault:
            if lanes is not None and fault.lane is not None:
                fault.lane = int(lanes[fault.lane])
            raise


def _pick(segment: Segment, offset: np.ndarray, access: Access) -> np.ndarray:
    if np.bitwise_or.reduce(offset) & access.low_bits:
        raw = segment.data[offset[:, None] + np.arange(access.size)].view(access.dtype)
        return raw if access.vector else raw[:, 0]
    return segment.view(access.dtype)[_elements(offset, access)]


def _put(segment: Segment, offset: np.ndarray, value: np.ndarray, access: Access) -> None:
    if np.bitwise_or.reduce(offset) & access.low_bits:
        raw = np.ascontiguousarray(value if access.vector else value[:, None]).view(np.uint8)
        segment.data[offset[:, None] + np.arange(access.size)] = raw
        return
    segment.view(access.dtype)[_elements(offset, access)] = value


def _elements(offset: np.ndarray, access: Access) -> np.ndarray:
    first = offset >> access.shift
    return first[:, None] + np.arange(access.count) if access.vector else first
