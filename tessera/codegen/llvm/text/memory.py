"""Memory of a program: the scratch arena, allocated by lifetimes, and vector loads and stores.

Accesses are contiguous, strided, gathers or scatters; masked at the end of an axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tessera.codegen.llvm.table import conversions
from tessera.codegen.llvm.text.builder import (
    LaneIndex,
    LaneKind,
    LaneValue,
    LlvmBuilder,
    LoopBody,
    emit_splat,
    format_step_vector,
)
from tessera.codegen.llvm.text.types import RegisterType, get_element_bytes, get_memory_type, get_register_type
from tessera.core.types import DType

# The scratch arena of one program: buffers, their layout, and where each lies once lifetimes are known.


SCRATCH_ALIGN = 64


@dataclass(eq=False)
class ScratchBuffer:
    """Room in the arena, from the first time it is touched to the last."""

    name: str
    bytes: int
    accesses: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class StridedMemRef:
    """Where elements lie: a pointer, and for each axis its size and its stride in elements."""

    dtype: DType
    base: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    buffer: ScratchBuffer | None = None
    trusted: bool = True  # whether every index that comes is known to be inside

    def at(self, base: str, strides: tuple[int, ...], shape: tuple[int, ...]) -> StridedMemRef:
        """Part of this memory, seen with other strides."""
        return StridedMemRef(self.dtype, base, shape, strides, self.buffer)


class ScratchAllocator:
    """The buffers of one kernel."""

    def __init__(self, text: LlvmBuilder) -> None:
        self.text = text
        self.buffers: list[ScratchBuffer] = []

    def block(self, dtype: DType, shape: Sequence[int], width: int) -> StridedMemRef:
        """A buffer for a block: rows padded so that whole vectors fit."""
        return self.memory(dtype, shape, pad_strides(shape, width))

    def memory(self, dtype: DType, shape: Sequence[int], strides: tuple[int, ...]) -> StridedMemRef:
        """A buffer with these strides."""
        count = max((n * s for n, s in zip(shape, strides, strict=True)), default=1) or 1
        buffer = self.room(max(count, 1) * get_element_bytes(dtype))
        return StridedMemRef(dtype, buffer.name, tuple(shape), strides, buffer)

    def room(self, count: int) -> ScratchBuffer:
        """A buffer of `count` bytes."""
        buffer = ScratchBuffer(f"%buf{len(self.buffers)}", math.ceil(count / SCRATCH_ALIGN) * SCRATCH_ALIGN)
        self.buffers.append(buffer)
        return buffer

    def record_access(self, memory: StridedMemRef) -> None:
        """Note that a memory is used here."""
        if memory.buffer is not None:
            memory.buffer.accesses.append(self.text.clock)

    def place(self) -> tuple[int, list[tuple[str, int]]]:
        """The size of the arena, and each buffer's offset in it; those never alive together share."""
        placed: list[tuple[int, int, int, int]] = []  # first, last, offset, end
        offsets = []
        used = [b for b in self.buffers if b.accesses]
        for buffer in sorted(used, key=lambda b: -b.bytes):
            first, last = self._life(buffer)
            taken = sorted((o, e) for f, t, o, e in placed if f <= last and first <= t)
            offset = _find_gap(taken, buffer.bytes)
            placed.append((first, last, offset, offset + buffer.bytes))
            offsets.append((buffer.name, offset))
        return max((e for *_, e in placed), default=0), offsets

    def _life(self, buffer: ScratchBuffer) -> tuple[int, int]:
        """From the first touch to the last; what a loop found alive it needs in every round."""
        first, last = min(buffer.accesses), max(buffer.accesses)
        for begin, end in self.text.loops:  # inner loops come before outer ones
            if first < begin and any(begin <= t <= end for t in buffer.accesses):
                last = max(last, end)
        return first, last


def _find_gap(taken: list[tuple[int, int]], room: int) -> int:
    at = 0
    for offset, end in taken:
        if offset - at >= room:
            break
        at = max(at, end)
    return at


def pad_strides(shape: Sequence[int], width: int) -> tuple[int, ...]:
    """Row-major strides with the last axis that is not 1 padded to whole vectors."""
    inner = max((a for a, n in enumerate(shape) if n != 1), default=-1)
    strides, step = [0] * len(shape), 1
    for axis in reversed(range(len(shape))):
        strides[axis] = step
        n = shape[axis]
        step *= math.ceil(n / fit_vector_width(width, n)) * fit_vector_width(width, n) if axis == inner else n
    return tuple(strides)


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of an array without padding."""
    return tuple(math.prod(shape[a + 1 :]) for a in range(len(shape)))


def fit_vector_width(width: int, count: int) -> int:
    """The vector width for `count` elements: no wider than needed."""
    return min(width, 1 << max(0, count - 1).bit_length())


# Reads and writes of one register's worth of elements: contiguous, strided, scattered, masked.


@dataclass(frozen=True)
class LaneAddress:
    """Where elements lie: a scalar offset, plus `stride` times their number, plus a vector of offsets."""

    scalar: str
    stride: int
    vector: str = ""

    @property
    def uniform(self) -> bool:
        """Whether all are one place."""
        return self.stride == 0 and not self.vector


def compute_address(body: LoopBody, m: StridedMemRef, index: LaneIndex) -> LaneAddress:
    """The place of an index in a memory, in elements."""
    scalar, stride, vector = "0", 0, ""
    for lane, step in zip(index, m.strides, strict=True):
        if lane.kind is LaneKind.VARYING:
            vector = _add_scaled_vector(body, vector, lane.name, step)
            continue
        stride += step if lane.kind is LaneKind.RAMP else 0
        scalar = body.text.add(scalar, body.text.mul(lane.name, step))
    return LaneAddress(scalar, stride, vector)


def _add_scaled_vector(body: LoopBody, total: str, name: str, step: int) -> str:
    t = RegisterType("i64", body.width)
    scaled = name if step == 1 else body.text.let(f"mul {t} {name}, {t.const(step)}", "o")
    return body.text.let(f"add {t} {total}, {scaled}", "o") if total else scaled


def load_lane(
    body: LoopBody, m: StridedMemRef, index: LaneIndex, mask: LaneValue | None = None, other: LaneValue | None = None
) -> LaneValue:
    """The elements at an index; `other` (0 when not given) where the mask is false."""
    body.kernel.scratch.record_access(m)
    lanes = [*index, *(x for x in (mask, other) if x is not None)]
    width = body.width_of(*lanes)
    with body.hoisted(*lanes):
        name = _load_masked(body, m, index, mask, other, width)
    return LaneValue(name, body.kind_of(*lanes))


def _load_masked(
    body: LoopBody, m: StridedMemRef, index: LaneIndex, mask: LaneValue | None, other: LaneValue | None, width: int
) -> str:
    raw = _load_raw(body, m, compute_address(body, m, index), _combine_tail_mask(body, mask, width), width)
    found = decode_loaded(body, m, raw, width)
    if mask is None or other is None:
        return found
    t = get_register_type(m.dtype, width)
    cond, rest = body.broadcast_lane(mask, t.truth), body.broadcast_lane(other, t)
    return body.text.let(f"select {t.truth} {cond}, {t} {found}, {t} {rest}")


def _combine_tail_mask(body: LoopBody, mask: LaneValue | None, width: int) -> str | None:
    """The mask of a memory access, with the elements past the end of the axis left out."""
    own = None if mask is None else body.broadcast_lane(mask, RegisterType("i1", width))
    end = body.mask if width > 1 else None
    if own is None or end is None:
        return own or end
    t = RegisterType("i1", width)
    return body.text.let(f"and {t} {own}, {end}", "m")


def _load_raw(body: LoopBody, m: StridedMemRef, place: LaneAddress, mask: str | None, width: int) -> str:
    t = get_memory_type(m.dtype, width)
    if place.uniform and width > 1 and mask is body.mask:
        one = body.text.let(f"load {t.element}, ptr {emit_pointer(body, m, place)}, align {get_element_bytes(m.dtype)}")
        return emit_splat(body.text, t, one)
    if place.vector or place.stride != 1 and width > 1:
        return _emit_gather(body, m, place, mask, t)
    at = emit_pointer(body, m, place)
    if mask is None:
        return body.text.let(f"load {t}, ptr {at}, align {get_element_bytes(m.dtype)}")
    if width > 1:
        return body.text.let(
            f"call {t} @llvm.masked.load.{t.suffix}.p0(ptr {at}, i32 {get_element_bytes(m.dtype)}, "
            f"{t.truth} {mask}, {t} zeroinitializer)"
        )
    return _load_scalar_masked(body, m, at, mask, t)


def _load_scalar_masked(body: LoopBody, m: StridedMemRef, at: str, mask: str, t: RegisterType) -> str:
    """A scalar behind a condition: reads the memory's first element instead, so that no branch is needed."""
    safe = body.text.let(f"select i1 {mask}, ptr {at}, ptr {m.base}", "p")
    raw = body.text.let(f"load {t}, ptr {safe}, align {get_element_bytes(m.dtype)}")
    return body.text.let(f"select i1 {mask}, {t} {raw}, {t} {t.const(0)}")


def emit_pointer(body: LoopBody, m: StridedMemRef, place: LaneAddress) -> str:
    """The address of the first element, in bytes."""
    if place.scalar == "0":
        return m.base
    return body.text.let(f"getelementptr {get_memory_type(m.dtype).element}, ptr {m.base}, i64 {place.scalar}", "p")


def _emit_pointer_vector(body: LoopBody, m: StridedMemRef, place: LaneAddress) -> str:
    t = RegisterType("i64", body.width)
    base = emit_pointer(body, m, LaneAddress(place.scalar, 0))
    offsets = format_step_vector(t, place.stride)
    if place.vector:
        offsets = body.text.let(f"add {t} {place.vector}, {offsets}", "o") if place.stride else place.vector
    return body.text.let(f"getelementptr {get_memory_type(m.dtype).element}, ptr {base}, {t} {offsets}", "p")


def _emit_gather(body: LoopBody, m: StridedMemRef, place: LaneAddress, mask: str | None, t: RegisterType) -> str:
    pointers = _emit_pointer_vector(body, m, place)
    which = mask or t.truth.const(1)
    return body.text.let(
        f"call {t} @llvm.masked.gather.{t.suffix}.v{t.width}p0({t.of('ptr')} {pointers}, "
        f"i32 {get_element_bytes(m.dtype)}, "
        f"{t.truth} {which}, {t} zeroinitializer)"
    )


def decode_loaded(body: LoopBody, m: StridedMemRef, raw: str, width: int) -> str:
    """What was read, as a register."""
    if not conversions.has_memory_format(m.dtype):
        return raw
    d = body.text.name()
    body.text.lines(conversions.decode_from_memory(m.dtype, width, d, raw))
    return d


def store_lane(
    body: LoopBody, m: StridedMemRef, index: LaneIndex, value: LaneValue, mask: LaneValue | None = None
) -> None:
    """Write elements at an index, where the mask holds."""
    body.kernel.scratch.record_access(m)
    place = compute_address(body, m, index)
    # Where many elements go to one place the last one stands: a scatter keeps that order.
    width = 1 if body.width_of(*index, value, *([mask] if mask else [])) == 1 else body.width
    raw = _encode_lane(body, m, value, width)
    which = _combine_tail_mask(body, mask, width)
    t = get_memory_type(m.dtype, width)
    if width > 1 and (place.vector or place.stride != 1):
        where, form = f"{t.of('ptr')} {_emit_pointer_vector(body, m, place)}", f"scatter.{t.suffix}.v{width}p0"
        body.text.line(_format_masked_store(form, t, raw, where, m, which or t.truth.const(1)))
        return
    at = emit_pointer(body, m, place)
    if which is None:
        body.text.line(f"store {t} {raw}, ptr {at}, align {get_element_bytes(m.dtype)}")
    elif width > 1:
        body.text.line(_format_masked_store(f"store.{t.suffix}.p0", t, raw, f"ptr {at}", m, which))
    else:
        _store_scalar_masked(body, m, at, raw, which, t)


def _format_masked_store(form: str, t: RegisterType, raw: str, where: str, m: StridedMemRef, mask: str) -> str:
    return f"call void @llvm.masked.{form}({t} {raw}, {where}, i32 {get_element_bytes(m.dtype)}, {t.truth} {mask})"


def _store_scalar_masked(body: LoopBody, m: StridedMemRef, at: str, raw: str, mask: str, t: RegisterType) -> None:
    """A scalar behind a condition, by a branch."""
    yes, done = body.text.new_label("then"), body.text.new_label("done")
    body.text.line(f"br i1 {mask}, label %{yes}, label %{done}")
    body.text.begin(yes)
    body.text.line(f"store {t} {raw}, ptr {at}, align {get_element_bytes(m.dtype)}")
    body.text.jump(done)


def _encode_lane(body: LoopBody, m: StridedMemRef, value: LaneValue, width: int) -> str:
    t = get_register_type(m.dtype, width)
    name = body.broadcast_lane(value, t)
    if not conversions.has_memory_format(m.dtype):
        return name
    d = body.text.name()
    body.text.lines(conversions.encode_to_memory(m.dtype, width, d, name))
    return d


def emit_inside_mask(body: LoopBody, m: StridedMemRef, index: LaneIndex, axes: tuple[int, ...]) -> LaneValue | None:
    """Whether an index lies in the memory along some axes; None where there are none."""
    found: LaneValue | None = None
    for axis in axes:
        lane = index[axis]
        t = RegisterType("i64", body.width_of(lane))
        with body.hoisted(lane):
            # Unsigned: a negative index is a very large one.
            name = body.text.let(f"icmp ult {t} {body.broadcast_lane(lane, t)}, {t.const(m.shape[axis])}", "m")
        found = intersect_masks(body, found, LaneValue(name, body.kind_of(lane)))
    return found


def intersect_masks(body: LoopBody, a: LaneValue | None, b: LaneValue | None) -> LaneValue | None:
    """Where two masks hold; None is a mask that always holds."""
    if a is None or b is None:
        return a or b
    t = RegisterType("i1", body.width_of(a, b))
    left, right = body.broadcast_lane(a, t), body.broadcast_lane(b, t)
    with body.hoisted(a, b):
        name = body.text.let(f"and {t} {left}, {right}", "m")
    return LaneValue(name, body.kind_of(a, b))
