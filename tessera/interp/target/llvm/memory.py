"""Segmented memory: memory formats of types, checked segments, loads and stores for one lane or for all lanes.

An address is a segment number above bit 36 and an offset from the middle of that segment's slot, so that an offset may
be gigabytes out of bounds either way and the error still names the right segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import count

import numpy as np

from tessera.core.errors import ArgumentError, OutOfBoundsError, ResourceError, UnsupportedOpError
from tessera.interp.target.llvm.lanes import LaneFault, canonicalise
from tessera.interp.target.llvm.text.syntax import LlvmInt, LlvmType, LlvmVector, round_up

# Memory formats: the bytes of a type, and their conversion to and from registers.


_Codec = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class MemoryFormat:
    """How one scalar or vector is loaded and stored: as `count` adjacent elements of `dtype`."""

    dtype: np.dtype
    count: int
    vector: bool  # whether the elements form a trailing axis
    size: int
    align: int
    decode: _Codec | None = None
    encode: _Codec | None = None

    @cached_property
    def low_bits(self) -> int:
        """The offset bits that must be zero for a typed view."""
        return self.dtype.itemsize - 1

    @cached_property
    def shift(self) -> int:
        """The number of bits that converts bytes to elements."""
        return self.dtype.itemsize.bit_length() - 1

    @cached_property
    def element_numbers(self) -> np.ndarray:
        """The numbers of the elements."""
        return np.arange(self.count)


@cache
def get_memory_format(type: LlvmType, align: int = 0) -> MemoryFormat:
    """The memory format of a type; `align` is 0 for its natural alignment."""
    align = align or type.align
    scalar = type.scalar
    if isinstance(scalar, LlvmInt) and not scalar.native:
        return _make_bit_format(type, scalar, align)
    count = type.count if isinstance(type, LlvmVector) else 1
    return MemoryFormat(type.dtype, count, isinstance(type, LlvmVector), type.size, align)


def _make_bit_format(type: LlvmType, scalar: LlvmInt, align: int) -> MemoryFormat:
    """The format of integers without a NumPy dtype: bools, bit vectors and unusual widths."""
    byte = np.dtype(np.uint8)
    if scalar.bits == 1 and isinstance(type, LlvmVector):
        count = type.count
        return MemoryFormat(byte, type.size, True, type.size, align, lambda raw: unpack_bits(raw, count), pack_bits)
    if isinstance(type, LlvmVector):
        raise UnsupportedOpError(f"a value of type {type} in memory is not supported")
    if scalar.bits == 1:
        return MemoryFormat(byte, 1, False, 1, align, lambda raw: (raw & 1).astype(bool), lambda v: v.astype(byte))
    size = scalar.size
    return MemoryFormat(
        byte,
        size,
        True,
        size,
        align,
        lambda raw: _decode_odd_integer(raw, scalar),
        lambda v: _encode_odd_integer(v, scalar),
    )


def pack_bits(bits: np.ndarray) -> np.ndarray:
    """Bools along the last axis as bytes, the first in the lowest bit."""
    return np.packbits(bits, axis=-1, bitorder="little")


def unpack_bits(raw: np.ndarray, count: int) -> np.ndarray:
    """Bytes along the last axis as bools."""
    return np.unpackbits(raw, axis=-1, count=count, bitorder="little").astype(bool)


def _decode_odd_integer(raw: np.ndarray, type: LlvmInt) -> np.ndarray:
    whole = np.zeros((len(raw), type.dtype.itemsize), np.uint8)
    whole[:, : raw.shape[-1]] = raw
    return canonicalise(whole.view(type.dtype)[:, 0], type)


def _encode_odd_integer(value: np.ndarray, type: LlvmInt) -> np.ndarray:
    # In memory the bits above the width are zero.
    mask = value.dtype.type((1 << type.bits) - 1)
    return np.ascontiguousarray((value & mask)[:, None]).view(np.uint8)[:, : type.size]


# Segments: named memory, and the faults of accesses out of bounds.


_SLOT_BITS = 36
_SLOT_MIDDLE = 1 << (_SLOT_BITS - 1)
_NULL_PAGE = 4096
MAX_STACK_BYTES = 1 << 32  # of one alloca


def get_base_address(number: int) -> int:
    """The first address of a segment."""
    return (number << _SLOT_BITS) + _SLOT_MIDDLE


def get_segment_number(address: int) -> int:
    """The segment of an address."""
    return address >> _SLOT_BITS


@dataclass
class MemorySegment:
    """Named bytes: one block of `size` bytes, or one for each lane at a distance of `stride`."""

    name: str
    base: int
    data: np.ndarray
    size: int
    stride: int = 1 << _SLOT_BITS
    writable: bool = True
    views: dict[np.dtype, np.ndarray] = field(default_factory=dict)

    def view(self, dtype: np.dtype) -> np.ndarray:
        """The bytes as elements of a dtype."""
        message = self.views.get(dtype)
        if message is None:
            whole = len(self.data) // dtype.itemsize * dtype.itemsize
            message = self.views[dtype] = self.data[:whole].view(dtype)
        return message

    def check_address(self, address: int, access: MemoryFormat, verb: str) -> int:
        """The offset of an address, checked."""
        offset = address - self.base
        inside = 0 <= offset <= len(self.data) - access.size
        if not inside or offset % self.stride + access.size > self.size:
            raise self._make_bounds_fault(offset, access, verb)
        self._check_access(offset, access, verb)
        return offset

    def check_addresses(
        self, places: np.ndarray, low: int, high: int, access: MemoryFormat, verb: str
    ) -> tuple[np.ndarray, int]:
        """The offsets of many addresses from `low` to `high`, checked, and the bits that any of the offsets has."""
        offset = places - self.base
        if low < self.base or high - self.base + access.size > len(self.data) or self._crosses_blocks(offset, access):
            bad = offset % self.stride > self.size - access.size
            bad |= (offset < 0) | (offset + access.size > len(self.data))
            lane = int(bad.argmax())
            raise self._make_bounds_fault(int(offset[lane]), access, verb, lane)
        bits = int(np.bitwise_or.reduce(offset))
        if bits & (access.align - 1):
            lane = int((offset & (access.align - 1)).argmax())
            self._check_access(int(offset[lane]), access, verb, lane)
        self._check_access(0, access, verb)
        return offset, bits

    def _crosses_blocks(self, offset: np.ndarray, access: MemoryFormat) -> bool:
        """Whether an access is not inside the block of one lane; a segment that is one block has no such borders."""
        if self.size == len(self.data):
            return False
        return bool(np.count_nonzero(offset % self.stride > self.size - access.size))

    def _check_access(self, offset: int, access: MemoryFormat, verb: str, lane: int | None = None) -> None:
        if offset & (access.align - 1):
            what = f"misaligned {verb} (align {access.align}) at offset {offset} of {self.name}"
            raise LaneFault(what, lane=lane)
        if not self.writable and not verb.endswith("load"):
            raise LaneFault(f"{verb} to {self.name}, which is read-only")

    def _make_bounds_fault(self, offset: int, access: MemoryFormat, verb: str, lane: int | None = None) -> LaneFault:
        if 0 <= offset < len(self.data):
            offset %= self.stride
        message = f"{verb} of {access.size} bytes at offset {offset} of {self.name} ({self.size} bytes)"
        return LaneFault(message, OutOfBoundsError, lane)


def make_unmapped_fault(address: int, access: MemoryFormat, verb: str, lane: int | None = None) -> LaneFault:
    """The fault of an address outside all segments."""
    what = "a null pointer" if abs(address) < _NULL_PAGE else f"address {address:#x}, which is not mapped"
    return LaneFault(f"{verb} of {access.size} bytes at {what}", OutOfBoundsError, lane)


# The memory of one call.


_POISON = 0xCB
_GUARD = 16

# Lanes (None: all of them), their segment, the checked offsets in it, and the bits that any of these has.
_SegmentLanes = tuple[np.ndarray | None, MemorySegment, np.ndarray, int]


class SegmentedMemory:
    """The segments of one call."""

    def __init__(self, first: int = 1) -> None:
        self._segments: dict[int, MemorySegment] = {}
        self._numbers = count(first)
        self._mapped: dict[tuple[int, int], int] = {}

    def add(self, name: str, data: np.ndarray, writable: bool = True, number: int = 0) -> int:
        """Add a segment; its address."""
        number = number or next(self._numbers)
        base = get_base_address(number)
        self._segments[number] = MemorySegment(name, base, data, len(data), writable=writable)
        return base

    def map(self, name: str, array: np.ndarray) -> int:
        """The address of an array argument, which is used in place; equal arrays have one segment."""
        if not array.flags.c_contiguous:
            raise ArgumentError(f"argument {name} must be C-contiguous", received=f"strides {array.strides}")
        key = (array.ctypes.data, array.nbytes)
        if key not in self._mapped:
            data = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
            self._mapped[key] = self.add(f"argument {name}", data, array.flags.writeable)
        return self._mapped[key]

    def allocate(self, name: str, size: int, align: int, lanes: int) -> np.ndarray:
        """Allocate poisoned bytes for each lane; their addresses."""
        number, stride = next(self._numbers), round_up(size + _GUARD, max(align, _GUARD))
        if stride * lanes > MAX_STACK_BYTES:
            raise ResourceError(
                f"{name} asks for {stride * lanes:,} bytes", expected=f"at most {MAX_STACK_BYTES:,} in all lanes"
            )
        data = np.full(stride * lanes, _POISON, np.uint8)
        self._segments[number] = MemorySegment(name, get_base_address(number), data, size, stride)
        return get_base_address(number) + stride * np.arange(lanes, dtype=np.int64)

    def bytes(self, address: int, count: int) -> np.ndarray:
        """A copy of the bytes from an address on.

        Raises:
            LaneFault: they are not all in one segment.
        """
        segment = self._segments.get(get_segment_number(address))
        offset = address - segment.base if segment is not None else -1
        if segment is None or not 0 <= offset <= len(segment.data) - count:
            raise LaneFault(f"{count} bytes at {address:#x} are out of bounds", OutOfBoundsError)
        return segment.data[offset : offset + count].copy()

    def free(self, address: int) -> None:
        """Remove the segment of an address."""
        del self._segments[get_segment_number(address)]

    def load(self, address: np.ndarray, access: MemoryFormat, verb: str = "load") -> np.ndarray:
        """The value at one address, or at one address for each lane."""
        if len(address) == 1:
            message = self._view_uniform(address, access, verb).copy()
            raw = message[None] if access.vector else message
        else:
            raw = self._gather(address, access, verb)
        return raw if access.decode is None else access.decode(raw)

    def store(self, address: np.ndarray, value: np.ndarray, access: MemoryFormat, verb: str = "store") -> None:
        """Store a value for each lane; of lanes with one address the last one's value stays."""
        raw = value if access.encode is None else access.encode(value)
        if len(address) == 1:
            self._view_uniform(address, access, verb)[...] = raw[-1]
            return
        for lanes, segment, offset, bits in self._group_by_segment(address, access, verb):
            _write_segment(segment, offset, bits, raw if lanes is None or len(raw) == 1 else raw[lanes], access)

    def _view_uniform(self, address: np.ndarray, access: MemoryFormat, verb: str) -> np.ndarray:
        """The elements at a single address, in place."""
        first_address = int(address[0])
        segment = self._segments.get(get_segment_number(first_address))
        if segment is None:
            raise make_unmapped_fault(first_address, access, verb)
        offset = segment.check_address(first_address, access, verb)
        if offset & access.low_bits:
            return segment.data[offset : offset + access.size].view(access.dtype)
        first = offset >> access.shift
        return segment.view(access.dtype)[first : first + access.count]

    def _gather(self, address: np.ndarray, access: MemoryFormat, verb: str) -> np.ndarray:
        groups = self._group_by_segment(address, access, verb)
        if len(groups) == 1 and groups[0][0] is None:
            _, segment, offset, bits = groups[0]
            return _read_segment(segment, offset, bits, access)
        shape = (len(address), access.count) if access.vector else (len(address),)
        out = np.empty(shape, access.dtype)
        for lanes, segment, offset, bits in groups:
            out[lanes] = _read_segment(segment, offset, bits, access)
        return out

    def _group_by_segment(self, address: np.ndarray, access: MemoryFormat, verb: str) -> list[_SegmentLanes]:
        """The lanes by segment; all addresses are checked before any access."""
        if not len(address):
            return []
        low, high = _find_range(address)
        if get_segment_number(low) == get_segment_number(high):
            return [self._check_group(address, low, high, None, access, verb)]
        numbers = get_segment_number(address)  # type: ignore[arg-type]
        sets = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
        parts = [(address[lanes], lanes) for lanes in sets]
        return [self._check_group(part, *_find_range(part), lanes, access, verb) for part, lanes in parts]

    def _check_group(
        self, address: np.ndarray, low: int, high: int, lanes: np.ndarray | None, access: MemoryFormat, verb: str
    ) -> _SegmentLanes:
        try:
            segment = self._segments.get(get_segment_number(low))
            if segment is None:
                raise make_unmapped_fault(int(address[0]), access, verb, 0)
            return lanes, segment, *segment.check_addresses(address, low, high, access, verb)
        except LaneFault as fault:
            if lanes is not None and fault.lane is not None:
                fault.lane = int(lanes[fault.lane])
            raise


_FEW_LANES = 32  # as many numbers Python compares sooner than NumPy


def _find_range(address: np.ndarray) -> tuple[int, int]:
    """The lowest and the highest address."""
    if len(address) <= _FEW_LANES:
        numbers = address.tolist()
        return min(numbers), max(numbers)
    return int(address.min()), int(address.max())


def _read_segment(segment: MemorySegment, offset: np.ndarray, bits: int, access: MemoryFormat) -> np.ndarray:
    if bits & access.low_bits:
        raw = segment.data[offset[:, None] + np.arange(access.size)].view(access.dtype)
        return raw if access.vector else raw[:, 0]
    return segment.view(access.dtype)[_compute_element_offsets(offset, access)]


def _write_segment(
    segment: MemorySegment, offset: np.ndarray, bits: int, value: np.ndarray, access: MemoryFormat
) -> None:
    if bits & access.low_bits:
        raw = np.ascontiguousarray(value if access.vector else value[:, None]).view(np.uint8)
        segment.data[offset[:, None] + np.arange(access.size)] = raw
        return
    segment.view(access.dtype)[_compute_element_offsets(offset, access)] = value


def _compute_element_offsets(offset: np.ndarray, access: MemoryFormat) -> np.ndarray:
    first = offset >> access.shift
    return first[:, None] + access.element_numbers if access.vector else first
