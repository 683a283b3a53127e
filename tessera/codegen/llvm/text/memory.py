"""Memory of a program: the scratch arena, allocated by live ranges, and vector loads and stores.

Accesses are contiguous, strided, gathers or scatters; the end of an axis is masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tessera.codegen.llvm.table import scalar_functions
from tessera.codegen.llvm.text.builder import (
    LaneIndex,
    LaneKind,
    LaneValue,
    LlvmBuilder,
    LoopBody,
    RegisterType,
    emit_splat,
    format_prefix_mask,
    format_step_vector,
    get_element_bytes,
    get_memory_type,
    get_register_type,
)
from tessera.core.symbolic_dim import Dim, Size
from tessera.core.types import DType

# The scratch arena of one program: buffers with disjoint live ranges share memory.


SCRATCH_ALIGN = 64


@dataclass(eq=False)
class ScratchBuffer:
    """A buffer in the arena; `accesses` are the clocks of the instructions that use it."""

    name: str
    bytes: int
    accesses: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class StridedMemRef:
    """A strided memory reference: a pointer, and for each axis its size and its stride in elements.

    A contiguous load or store of a register prefetches what is so many bytes `ahead`, unless they are 0.
    """

    dtype: DType
    base: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    buffer: ScratchBuffer | None = None
    ahead: int = 0

    def at(self, base: str, strides: tuple[Size, ...], shape: tuple[Size, ...]) -> StridedMemRef:
        """A part of this memory, with other strides."""
        return StridedMemRef(self.dtype, base, shape, strides, self.buffer)


class ScratchAllocator:
    """Allocates the scratch buffers of one kernel."""

    def __init__(self, text: LlvmBuilder) -> None:
        self.text = text
        self.buffers: list[ScratchBuffer] = []

    def allocate_block(self, dtype: DType, shape: Sequence[int], width: int) -> StridedMemRef:
        """A buffer for a block, with rows padded to whole vectors."""
        return self.allocate(dtype, shape, pad_strides(shape, width))

    def allocate(self, dtype: DType, shape: Sequence[int], strides: tuple[Any, ...]) -> StridedMemRef:
        """A buffer with given strides."""
        count = max((n * s for n, s in zip(shape, strides, strict=True)), default=1) or 1
        buffer = self.allocate_bytes(max(count, 1) * get_element_bytes(dtype))
        return StridedMemRef(dtype, buffer.name, tuple(shape), strides, buffer)

    def allocate_bytes(self, count: int) -> ScratchBuffer:
        """A buffer of `count` bytes."""
        buffer = ScratchBuffer(f"%buf{len(self.buffers)}", math.ceil(count / SCRATCH_ALIGN) * SCRATCH_ALIGN)
        self.buffers.append(buffer)
        return buffer

    def record_access(self, memory: StridedMemRef) -> None:
        """Record that the next instruction accesses a memory."""
        if memory.buffer is not None:
            memory.buffer.accesses.append(self.text.clock)

    def assign_offsets(self) -> tuple[int, list[tuple[str, int]]]:
        """The size of the arena, and each buffer's offset in it; buffers with disjoint live ranges may overlap."""
        placed: list[tuple[int, int, int, int]] = []  # first, last, offset, end
        offsets = []
        used = [b for b in self.buffers if b.accesses]
        for buffer in sorted(used, key=lambda b: -b.bytes):
            first, last = self._find_live_range(buffer)
            occupied = sorted((o, e) for f, t, o, e in placed if f <= last and first <= t)
            offset = _find_gap(occupied, buffer.bytes)
            placed.append((first, last, offset, offset + buffer.bytes))
            offsets.append((buffer.name, offset))
        return max((e for *_, e in placed), default=0), offsets

    def _find_live_range(self, buffer: ScratchBuffer) -> tuple[int, int]:
        """The first and last access; a buffer written before a loop that uses it is live to the end of the loop."""
        first, last = min(buffer.accesses), max(buffer.accesses)
        for begin, end in self.text.loops:  # inner loops first
            if first < begin and any(begin <= t <= end for t in buffer.accesses):
                last = max(last, end)
        return first, last


def _find_gap(occupied: list[tuple[int, int]], room: int) -> int:
    at = 0
    for offset, end in occupied:
        if offset - at >= room:
            break
        at = max(at, end)
    return at


def pad_strides(shape: Sequence[int], width: int) -> tuple[int, ...]:
    """Row-major strides, with the last axis of more than one element padded to whole vectors."""
    inner = max((a for a, n in enumerate(shape) if n != 1), default=-1)
    strides, step = [0] * len(shape), 1
    for axis in reversed(range(len(shape))):
        strides[axis] = step
        n = shape[axis]
        step *= math.ceil(n / fit_vector_width(width, n)) * fit_vector_width(width, n) if axis == inner else n
    return tuple(strides)


def make_row_major_strides(shape: Sequence[Size]) -> tuple[Size, ...]:
    """The strides of a row-major array without padding."""
    return tuple(math.prod(shape[a + 1 :]) for a in range(len(shape)))


def fit_vector_width(width: int, count: int) -> int:
    """The vector width for `count` elements: the given one, or the next power of two."""
    return min(width, 1 << max(0, count - 1).bit_length())


MAX_SHUFFLED_STRIDE = 8  # lanes further apart are gathered

# Loads and stores of one vector register: contiguous, strided, gathers and scatters; masked.


@dataclass(frozen=True)
class LaneAddress:
    """The offsets of lanes, in elements: a scalar, plus `stride` times the lane's number, plus a vector.

    With `repeat` the offsets count up from the scalar `first`, each `repeat` times.
    """

    scalar: str
    stride: int
    vector: str = ""
    repeat: int = 0
    first: str = ""

    @property
    def uniform(self) -> bool:
        """Whether all lanes have one address."""
        return self.stride == 0 and not self.vector


def compute_address(body: LoopBody, m: StridedMemRef, index: LaneIndex) -> LaneAddress:
    """The offsets of an index in a memory; an axis of one element has one index within bounds."""
    scalar, stride, vector = "0", 0, ""
    places = [(lane, step) for lane, step, n in zip(index, m.strides, m.shape, strict=True) if n != 1]
    for lane, step in places:
        if lane.kind is LaneKind.VARYING or (lane.kind is LaneKind.RAMP and isinstance(step, Dim) and body.width > 1):
            name = body.broadcast_lane(lane, RegisterType("i64", body.width))
            vector = _add_scaled_vector(body, vector, name, step)
            continue
        if isinstance(step, Dim):
            scalar = body.text.add(scalar, body.text.multiply(lane.name, body.kernel.sizes.find(step)))
            continue
        stride += step * lane.step if lane.kind is LaneKind.RAMP else 0
        scalar = body.text.add(scalar, body.text.mul(lane.name, step))
    return _find_repeated(body, LaneAddress(scalar, stride, vector), places)


def _find_repeated(body: LoopBody, address: LaneAddress, places: Sequence[tuple[LaneValue, Size]]) -> LaneAddress:
    """The address with what is known of its vector.

    An index of repeated numbers at stride 1, or such an index together with one that counts within each group.
    """
    varying = sorted((x for x in places if not x[0].uniform), key=lambda x: -x[0].repeat)
    if not varying or not varying[0][0].repeat or isinstance(varying[0][1], Dim):
        return address
    lane, step, rest = varying[0][0], int(varying[0][1]), varying[1:]
    if not rest and step == 1:
        return replace(address, repeat=lane.repeat, first=body.text.add(address.scalar, lane.base))
    if len(rest) == 1 and rest[0][0].cycle == lane.repeat and rest[0][1] * lane.repeat == step:
        return LaneAddress(body.text.add(address.scalar, body.text.mul(lane.base, step)), int(rest[0][1]))
    return address


def _add_scaled_vector(body: LoopBody, total: str, name: str, step: Size) -> str:
    t = RegisterType("i64", body.width)
    factor = splat_size(body, t, step)
    scaled = name if step == 1 else body.text.let(f"mul {t} {name}, {factor}", "o")
    return body.text.let(f"add {t} {total}, {scaled}", "o") if total else scaled


def splat_size(body: LoopBody, t: RegisterType, size: Size) -> str:
    """A size in every lane."""
    if not isinstance(size, Dim):
        return t.const(size)
    name = body.kernel.sizes.find(size)
    return name if t.width == 1 else emit_splat(body.text, t, name)


def load_lane(
    body: LoopBody, m: StridedMemRef, index: LaneIndex, mask: LaneValue | None = None, other: LaneValue | None = None
) -> LaneValue:
    """The elements at an index; `other` (0 by default) where the mask is false."""
    body.kernel.scratch.record_access(m)
    lanes = [*index, *(x for x in (mask, other) if x is not None)]
    width = body.width_of(*lanes)
    with body.hoist(*lanes):
        name = _load_masked(body, m, index, mask, other, width)
    return LaneValue(name, body.kind_of(*lanes))


def _load_masked(
    body: LoopBody, m: StridedMemRef, index: LaneIndex, mask: LaneValue | None, other: LaneValue | None, width: int
) -> str:
    address = compute_address(body, m, index)
    plain = _is_shuffled(address, width) or (width > 1 and not address.vector and address.stride == 1)
    if mask is not None and mask.uniform and plain and _has_room(m, address, width):
        # All lanes or none: where none is wanted, the first elements of the memory are loaded and not used. A masked
        # load of no lane from outside of the program's memory takes the processor hundreds of cycles.
        at = body.text.let(f"select i1 {mask.name}, ptr {emit_pointer(body, m, address)}, ptr {m.base}", "p")
        there = m.at(at, m.strides, m.shape)
        raw = _load_raw(body, there, replace(address, scalar="0"), body.mask, width)
        other = other or LaneValue(get_register_type(m.dtype).const(0))
    else:
        if mask is not None and mask.condition and width > 1 and not address.vector and address.stride == 1:
            at = body.text.let(f"select i1 {mask.condition}, ptr {emit_pointer(body, m, address)}, ptr {m.base}", "p")
            m, address = m.at(at, m.strides, m.shape), replace(address, scalar="0")  # no lane, no page: as above
        raw = _load_raw(body, m, address, _combine_tail_mask(body, mask, width), width)
    result = decode_loaded(body, m, raw, width)
    if mask is None or other is None:
        return result
    t = get_register_type(m.dtype, width)
    cond, rest = body.broadcast_lane(mask, t.truth), body.broadcast_lane(other, t)
    return body.text.let(f"select {t.truth} {cond}, {t} {result}, {t} {rest}")


def _combine_tail_mask(body: LoopBody, mask: LaneValue | None, width: int) -> str | None:
    """The mask of an access: the given one, and that of a partial vector."""
    own = None if mask is None else body.broadcast_lane(mask, RegisterType("i1", width))
    end = body.mask if width > 1 else None
    if own is None or end is None:
        return own or end
    t = RegisterType("i1", width)
    return body.text.let(f"and {t} {own}, {end}", "m")


def _load_raw(body: LoopBody, m: StridedMemRef, address: LaneAddress, mask: str | None, width: int) -> str:
    t = get_memory_type(m.dtype, width)
    if address.uniform and width > 1 and mask is body.mask:
        one = body.text.let(
            f"load {t.element}, ptr {emit_pointer(body, m, address)}, align {get_element_bytes(m.dtype)}"
        )
        return emit_splat(body.text, t, one)
    if not address.vector and address.stride == -1 and width > 1:
        return _load_reversed(body, m, address, mask, t)
    if _is_shuffled(address, width) and mask is body.mask:
        return _load_strided(body, m, address, t)
    if address.repeat and width > 1 and mask is None:
        return _load_repeated(body, m, address, t)
    if address.vector or address.stride != 1 and width > 1:
        return _emit_gather(body, m, address, mask, t)
    at = emit_pointer(body, m, address)
    _prefetch_ahead(body, m, at, width, 0)
    if mask is None:
        return body.text.let(f"load {t}, ptr {at}, align {get_element_bytes(m.dtype)}")
    if width > 1:
        return body.text.let(
            f"call {t} @llvm.masked.load.{t.suffix}.p0(ptr {at}, i32 {get_element_bytes(m.dtype)}, "
            f"{t.truth} {mask}, {t} zeroinitializer)"
        )
    return _load_scalar_masked(body, m, at, mask, t)


def _is_shuffled(address: LaneAddress, width: int) -> bool:
    """Whether contiguous loads and shuffles give the lanes."""
    return not address.vector and 2 <= address.stride <= MAX_SHUFFLED_STRIDE and width > 1


def _has_room(m: StridedMemRef, address: LaneAddress, width: int) -> bool:
    """Whether the memory has, from its first element on, at least the elements of one access."""
    if any(isinstance(n, Dim) for n in (*m.shape, *m.strides)) or any(int(s) < 0 for s in m.strides) or 0 in m.shape:
        return False
    return sum(int(s) * (int(n) - 1) for n, s in zip(m.shape, m.strides, strict=True)) >= (width - 1) * address.stride


def _load_reversed(body: LoopBody, m: StridedMemRef, address: LaneAddress, mask: str | None, t: RegisterType) -> str:
    """Lanes in descending order of address: one load, reversed."""
    first = LaneAddress(body.text.add(address.scalar, str(1 - t.width)), 1)
    at, size = emit_pointer(body, m, first), get_element_bytes(m.dtype)
    if mask is None:
        return _reverse(body, t, body.text.let(f"load {t}, ptr {at}, align {size}"))
    call = f"call {t} @llvm.masked.load.{t.suffix}.p0(ptr {at}, i32 {size}, {t.truth} {_reverse(body, t.truth, mask)}, "
    return _reverse(body, t, body.text.let(f"{call}{t} zeroinitializer)"))


def _reverse(body: LoopBody, t: RegisterType, name: str) -> str:
    picks = ", ".join(f"i32 {t.width - 1 - i}" for i in range(t.width))
    return body.text.let(f"shufflevector {t} {name}, {t} poison, <{t.width} x i32> <{picks}>")


def _load_repeated(body: LoopBody, m: StridedMemRef, address: LaneAddress, t: RegisterType) -> str:
    """Lanes in groups of one element each: a load of a part of a register, spread by a shuffle."""
    part = RegisterType(t.element, t.width // address.repeat)
    at = emit_pointer(body, m, LaneAddress(address.first, 1))
    raw = body.text.let(f"load {part}, ptr {at}, align {get_element_bytes(m.dtype)}")
    picks = ", ".join(f"i32 {i // address.repeat}" for i in range(t.width))
    return body.text.let(f"shufflevector {part} {raw}, {part} poison, <{t.width} x i32> <{picks}>")


def load_then_mask(body: LoopBody, m: StridedMemRef, index: LaneIndex, mask: LaneValue | None) -> LaneValue:
    """The elements at an index that is within bounds in every lane; 0 where the mask is false."""
    lane = load_lane(body, m, index)
    if mask is None:
        return lane
    t = get_register_type(m.dtype, body.width_of(lane, mask))
    cond, found = body.broadcast_lane(mask, t.truth), body.broadcast_lane(lane, t)
    name = body.text.let(f"select {t.truth} {cond}, {t} {found}, {t} {t.const(0)}")
    return LaneValue(name, body.kind_of(lane, mask))


def _load_strided(body: LoopBody, m: StridedMemRef, address: LaneAddress, t: RegisterType) -> str:
    """Lanes a few elements apart: contiguous loads, the last of which ends at the last lane's element, and shuffles.

    The elements past the last lane of a partial vector are not loaded.
    """
    width, starts = t.width, _find_starts(address.stride, t.width)
    lanes = width if body.mask is None else body.mask.count("true")
    parts = []
    for offset in starts:
        at = emit_pointer(body, m, LaneAddress(body.text.add(address.scalar, str(offset)), 1))
        count, size = (lanes - 1) * address.stride + 1 - offset, get_element_bytes(m.dtype)
        if count >= width:
            parts.append(body.text.let(f"load {t}, ptr {at}, align {size}"))
        elif count > 0:
            load = f"call {t} @llvm.masked.load.{t.suffix}.p0(ptr {at}, i32 {size}, "
            mask = f"{t.truth} {format_prefix_mask(width, count)}"
            parts.append(body.text.let(f"{load}{mask}, {t} zeroinitializer)"))
        else:
            parts.append("poison")
    found = parts[0]
    for number in range(1, len(parts)):
        picks = [_pick_lane(lane, address.stride, width, number, starts) for lane in range(width)]
        listed = ", ".join(f"i32 {p}" for p in picks)
        found = body.text.let(f"shufflevector {t} {found}, {t} {parts[number]}, <{width} x i32> <{listed}>")
    return found


def _find_starts(stride: int, width: int) -> list[int]:
    """The starts of contiguous loads that have all lanes and nothing past the last one."""
    starts: list[int] = []
    for place in range(0, width * stride, stride):
        if not starts or place >= starts[-1] + width:
            starts.append(min(place, (width - 1) * (stride - 1)))
    return starts


def _pick_lane(lane: int, stride: int, width: int, number: int, starts: Sequence[int]) -> int:
    """The element for a lane of a shuffle of the lanes found so far and of part `number`.

    The first shuffle moves the lanes of the first part to their places.
    """
    place = lane * stride
    part = next(i for i, start in enumerate(starts) if start <= place < start + width)
    if part == number:
        return width + place - starts[number]
    return place if part == 0 and number == 1 else lane


def _load_scalar_masked(body: LoopBody, m: StridedMemRef, at: str, mask: str, t: RegisterType) -> str:
    """A masked scalar load without a branch: where the mask is false, it loads the memory's first element."""
    safe = body.text.let(f"select i1 {mask}, ptr {at}, ptr {m.base}", "p")
    raw = body.text.let(f"load {t}, ptr {safe}, align {get_element_bytes(m.dtype)}")
    return body.text.let(f"select i1 {mask}, {t} {raw}, {t} {t.const(0)}")


def emit_pointer(body: LoopBody, m: StridedMemRef, address: LaneAddress) -> str:
    """The address of the first lane."""
    if address.scalar == "0":
        return m.base
    return body.text.let(f"getelementptr {get_memory_type(m.dtype).element}, ptr {m.base}, i64 {address.scalar}", "p")


def _emit_pointer_vector(body: LoopBody, m: StridedMemRef, address: LaneAddress) -> str:
    t = RegisterType("i64", body.width)
    base = emit_pointer(body, m, LaneAddress(address.scalar, 0))
    offsets = format_step_vector(t, address.stride)
    if address.vector:
        offsets = body.text.let(f"add {t} {address.vector}, {offsets}", "o") if address.stride else address.vector
    return body.text.let(f"getelementptr {get_memory_type(m.dtype).element}, ptr {base}, {t} {offsets}", "p")


def _emit_gather(body: LoopBody, m: StridedMemRef, address: LaneAddress, mask: str | None, t: RegisterType) -> str:
    pointers = _emit_pointer_vector(body, m, address)
    lane_mask = mask or t.truth.const(1)
    return body.text.let(
        f"call {t} @llvm.masked.gather.{t.suffix}.v{t.width}p0({t.of('ptr')} {pointers}, "
        f"i32 {get_element_bytes(m.dtype)}, "
        f"{t.truth} {lane_mask}, {t} zeroinitializer)"
    )


def decode_loaded(body: LoopBody, m: StridedMemRef, raw: str, width: int) -> str:
    """The register of loaded elements."""
    if not scalar_functions.has_memory_format(m.dtype):
        return raw
    d = body.text.new_name()
    body.text.lines(scalar_functions.decode_from_memory(m.dtype, width, d, raw))
    return d


def store_lane(
    body: LoopBody, m: StridedMemRef, index: LaneIndex, value: LaneValue, mask: LaneValue | None = None
) -> None:
    """Store elements at an index, where the mask is true."""
    body.kernel.scratch.record_access(m)
    address = compute_address(body, m, index)
    # Of several elements with one address the last one is stored: a scatter keeps that order.
    width = 1 if body.width_of(*index, value, *([mask] if mask else [])) == 1 else body.width
    raw = _encode_lane(body, m, value, width)
    lane_mask = _combine_tail_mask(body, mask, width)
    t = get_memory_type(m.dtype, width)
    if width > 1 and (address.vector or address.stride != 1):
        pointers, form = f"{t.of('ptr')} {_emit_pointer_vector(body, m, address)}", f"scatter.{t.suffix}.v{width}p0"
        body.text.line(_format_masked_store(form, t, raw, pointers, m, lane_mask or t.truth.const(1)))
        return
    at = emit_pointer(body, m, address)
    _prefetch_ahead(body, m, at, width, 1)
    if width > 1 and body.mask == format_prefix_mask(width, 1):
        _store_first_lane(body, m, at, raw, lane_mask if mask is not None else None, t)
    elif lane_mask is None:
        body.text.line(f"store {t} {raw}, ptr {at}, align {get_element_bytes(m.dtype)}")
    elif width > 1:
        body.text.line(_format_masked_store(f"store.{t.suffix}.p0", t, raw, f"ptr {at}", m, lane_mask))
    else:
        _store_scalar_masked(body, m, at, raw, lane_mask, t)


def store_interleaved(body: LoopBody, m: StridedMemRef, index: LaneIndex, values: Sequence[LaneValue]) -> None:
    """Store a register of short rows, which lie one behind the other: `values` has a register for each column."""
    body.kernel.scratch.record_access(m)
    t, count = get_memory_type(m.dtype, body.width), len(values)
    address = compute_address(body, m, index)
    assert not address.vector and address.stride == count
    raw = [_encode_lane(body, m, value, body.width) for value in values]
    for part in range(count):
        places = range(part * t.width, (part + 1) * t.width)
        found = raw[0]
        for column in range(1, count):
            picks = [t.width + p // count if p % count == column else i for i, p in enumerate(places)]
            if column == 1:  # the lanes of the first column move to their places, too
                picks = [p // count if p % count == 0 else pick for p, pick in zip(places, picks, strict=True)]
            listed = ", ".join(f"i32 {p}" for p in picks)
            found = body.text.let(f"shufflevector {t} {found}, {t} {raw[column]}, <{t.width} x i32> <{listed}>")
        at = emit_pointer(body, m, LaneAddress(body.text.add(address.scalar, str(part * t.width)), 1))
        body.text.line(f"store {t} {found}, ptr {at}, align {get_element_bytes(m.dtype)}")


STORED_AHEAD = 6  # rows between one that is stored and the one that is fetched
PAGE_BYTES = 4096
LEAST_PIECE = 64  # bytes of a piece, below which fetching takes longer than it saves


def fetch_rows_ahead(m: StridedMemRef, block: Sequence[int]) -> StridedMemRef:
    """Memory of which a block writes short pieces of rows, each in a page of its own: later rows are fetched.

    A processor does not foresee these lines, and stores wait for them in their order.
    """
    axis = next((a for a in range(len(block) - 2, -1, -1) if block[a] > 1), None)
    if axis is None or m.strides[-1] != 1 or not isinstance(m.strides[axis], int):
        return m
    stride, size = int(m.strides[axis]), get_element_bytes(m.dtype)
    is_far = stride * size >= PAGE_BYTES >= block[-1] * size >= LEAST_PIECE
    return replace(m, ahead=STORED_AHEAD * stride * size) if is_far and block[axis] > STORED_AHEAD else m


def _prefetch_ahead(body: LoopBody, m: StridedMemRef, at: str, width: int, write: int) -> None:
    """Fetch the line that is so many bytes ahead of a register, to read it or to write it."""
    if m.ahead and width > 1:
        later = body.text.let(f"getelementptr i8, ptr {at}, i64 {m.ahead}", "p")
        body.text.line(f"call void @llvm.prefetch.p0(ptr {later}, i32 {write}, i32 3, i32 1)")


def _format_masked_store(form: str, t: RegisterType, raw: str, pointers: str, m: StridedMemRef, mask: str) -> str:
    return f"call void @llvm.masked.{form}({t} {raw}, {pointers}, i32 {get_element_bytes(m.dtype)}, {t.truth} {mask})"


def _store_first_lane(body: LoopBody, m: StridedMemRef, at: str, raw: str, mask: str | None, t: RegisterType) -> None:
    """Store one element of a vector, where the mask is true, if there is one.

    LLVM 22 lowers a masked store of one element, truncated from wider ones, to a scalar store of the wide type, which
    writes past the end.
    """
    one, element = body.text.let(f"extractelement {t} {raw}, i64 0"), RegisterType(t.element)
    if mask is None:
        body.text.line(f"store {element} {one}, ptr {at}, align {get_element_bytes(m.dtype)}")
    else:
        holds = body.text.let(f"extractelement {t.truth} {mask}, i64 0")
        _store_scalar_masked(body, m, at, one, holds, element)


def _store_scalar_masked(body: LoopBody, m: StridedMemRef, at: str, raw: str, mask: str, t: RegisterType) -> None:
    """A masked scalar store, by a branch."""
    yes, done = body.text.new_label("then"), body.text.new_label("done")
    body.text.line(f"br i1 {mask}, label %{yes}, label %{done}")
    body.text.begin_block(yes)
    body.text.line(f"store {t} {raw}, ptr {at}, align {get_element_bytes(m.dtype)}")
    body.text.branch_to(done)


def _encode_lane(body: LoopBody, m: StridedMemRef, value: LaneValue, width: int) -> str:
    t = get_register_type(m.dtype, width)
    name = body.broadcast_lane(value, t)
    if not scalar_functions.has_memory_format(m.dtype):
        return name
    d = body.text.new_name()
    body.text.lines(scalar_functions.encode_to_memory(m.dtype, width, d, name))
    return d


def emit_inside_mask(body: LoopBody, m: StridedMemRef, index: LaneIndex, axes: tuple[int, ...]) -> LaneValue | None:
    """The mask of indices within bounds along some axes; None without axes."""
    result: LaneValue | None = None
    for axis in axes:
        lane, size = index[axis], m.shape[axis]
        if lane.interval is not None and isinstance(size, int) and 0 <= lane.interval[0] and lane.interval[1] < size:
            continue
        t = RegisterType("i64", body.width_of(lane))
        with body.hoist(lane):
            # Compared as unsigned, a negative index is out of bounds.
            name = body.text.let(
                f"icmp ult {t} {body.broadcast_lane(lane, t)}, {splat_size(body, t, m.shape[axis])}", "m"
            )
        result = intersect_masks(body, result, LaneValue(name, body.kind_of(lane)))
    return result


def intersect_masks(body: LoopBody, a: LaneValue | None, b: LaneValue | None) -> LaneValue | None:
    """The conjunction of two masks; None stands for all true."""
    if a is None or b is None:
        return a or b
    t = RegisterType("i1", body.width_of(a, b))
    left, right = body.broadcast_lane(a, t), body.broadcast_lane(b, t)
    with body.hoist(a, b):
        name = body.text.let(f"and {t} {left}, {right}", "m")
    return LaneValue(name, body.kind_of(a, b), condition=next((x.name for x in (a, b) if x.uniform), a.condition))
