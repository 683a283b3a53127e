"""Tensor copies (TMA): boxes copied by tensor maps with swizzling and out-of-bounds fill; tensormap.replace."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from tessera.core.errors import AsyncCopyError, OutOfBoundsError
from tessera.interp.target.ptx.isa.addressing import (
    AddressOperandReader,
    check_address,
    decode_address,
    fill_masked_lanes,
    require_known_modifiers,
    resolve_accesses,
)
from tessera.interp.target.ptx.isa.async_copy import (
    BULK_REDUCTIONS,
    COPY_RULES,
    BulkTransfer,
    find_multicast_offsets,
    record_bulk_transfer,
)
from tessera.interp.target.ptx.isa.atomics import reduce_cells
from tessera.interp.target.ptx.isa.data_movement import record_access
from tessera.interp.target.ptx.isa.decoder import CONTROL_RULES, PtxDecoder, decode_rule
from tessera.interp.target.ptx.isa.mbarrier import complete_transaction, find_mbarrier_offsets
from tessera.interp.target.ptx.isa.operands import Reader, get_vector_parts
from tessera.interp.target.ptx.isa.tensor_map import (
    MAGIC,
    SWIZZLES,
    TYPE_NAMES,
    TensorMapBox,
    decode_tensor_map,
    find_field,
)
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.memory import GENERIC_WINDOWS, PtxFault
from tessera.interp.target.ptx.machine.simt import DecodedInstruction, PtxMachine
from tessera.interp.target.ptx.text.syntax import TYPES, AddressOperand, ImmediateOperand, PtxInstruction, PtxOperand

# Copies of boxes by tensor maps.


_TENSOR_COPY_WORDS = {
    "async", "bulk", "tensor", "reduce", "shared::cluster", "shared::cta", "global", "tile", "bulk_group",
    "mbarrier::complete_tx::bytes", "multicast::cluster", "L2::cache_hint",
    "im2col", "im2col_no_offs", "1d", "2d", "3d", "4d", "5d", *BULK_REDUCTIONS,
}  # fmt: skip
_SWIZZLE_BITS = {32: 1, 64: 3, 128: 7}  # which of the address bits 4 to 6 are XORed with bits 7 to 9
_MAP_BYTES = 128
_SHARED_ALIGNMENT = 128
_CHUNK = 16  # bytes


def swizzle_offsets(offset: np.ndarray, swizzle: int) -> np.ndarray:
    """Swizzled offsets in shared memory: chunks of 16 bytes are permuted within their row.

    >>> swizzle_offsets(np.array([0, 128, 144, 1024]), 128).tolist()
    [0, 144, 128, 1024]
    """
    if not swizzle:
        return offset
    return offset ^ ((offset >> 7 & _SWIZZLE_BITS[swizzle]) << 4)


@lru_cache(maxsize=64)
def _compute_box_coordinates(box: TensorMapBox) -> tuple[np.ndarray, ...]:
    """For each element of a box, in shared memory order, its index in each dimension."""
    grids = np.meshgrid(
        *(np.arange(n) * s for n, s in zip(reversed(box.counts), reversed(box.steps), strict=True)), indexing="ij"
    )
    return tuple(g.reshape(-1) for g in reversed(grids))


@lru_cache(maxsize=64)
def _compute_global_offsets(box: TensorMapBox) -> np.ndarray:
    """The byte offsets of a box's elements from its first element."""
    total = np.zeros(int(np.prod(box.counts)), np.int64)
    for position, stride in zip(_compute_box_coordinates(box), box.strides, strict=True):
        total += position * stride
    return total


@lru_cache(maxsize=64)
def _compute_shared_offsets(box: TensorMapBox, phase: int) -> np.ndarray:
    """The byte offsets of a box's elements in shared memory; its start is at `phase` of a swizzle pattern."""
    linear = np.arange(int(np.prod(box.counts))) * box.itemsize
    return swizzle_offsets(linear + phase, box.swizzle) - phase


@lru_cache(maxsize=256)
def _list_pixels(box: TensorMapBox, start: tuple[int, ...]) -> np.ndarray:
    """The pixels that a copy of images visits, as rows of coordinates: the innermost dimension first, the image last.

    From the start along the innermost dimension, in the box's steps; behind the upper corner of the bounding box, on
    from the lower one in the next dimension (PTX ISA, "im2col mode").
    """
    assert box.corners is not None
    lower, upper = box.corners
    last = [n - 1 + u for n, u in zip(box.sizes[1:-1], upper, strict=True)]
    pixel, result = list(start), []
    for _ in range(box.box[1]):
        result.append(tuple(pixel))
        for d, (low, end) in enumerate(zip(lower, last, strict=True)):
            pixel[d] += box.steps[1 + d]
            if pixel[d] <= end:
                break
            pixel[d] = low
        else:
            pixel[-1] += 1
    return np.array(result)


def _locate_elements(
    box: TensorMapBox, coordinates: tuple[int, ...], taps: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray | None]:
    """The byte offsets of a copy's elements from the tensor's start, and which are within it (None: all)."""
    if box.corners is None:
        first = sum(c * s for c, s in zip(coordinates, box.strides, strict=True))
        return first + _compute_global_offsets(box), compute_in_bounds_mask(box, coordinates)
    channel = coordinates[0] + np.arange(box.box[0])
    pixels = _list_pixels(box, coordinates[1:]) + np.array([*taps, 0])
    within = np.all((pixels >= 0) & (pixels < box.sizes[1:]), axis=1)[:, None] & (channel < box.sizes[0])
    offsets = (pixels @ np.array(box.strides[1:]))[:, None] + channel * box.strides[0]
    return offsets.reshape(-1), None if within.all() else within.reshape(-1)


def compute_in_bounds_mask(box: TensorMapBox, coordinates: tuple[int, ...]) -> np.ndarray | None:
    """Which elements of a box are within the tensor; None if all are."""
    last = [c + (n - 1) * s for c, n, s in zip(coordinates, box.counts, box.steps, strict=True)]
    if min(coordinates) >= 0 and all(e < n for e, n in zip(last, box.sizes, strict=True)):
        return None
    result = np.ones(int(np.prod(box.counts)), bool)
    for position, c, n in zip(_compute_box_coordinates(box), coordinates, box.sizes, strict=True):
        result &= (position + c >= 0) & (position + c < n)
    return result


@decode_rule("async.bulk.tensor", "reduce.async.bulk.tensor", table=COPY_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    if not set(inst.op[1:]) <= _TENSOR_COPY_WORDS:
        raise d.unsupported(inst)
    to_shared = inst.op.index("global") > min(inst.op.index(w) for w in inst.op if w.startswith("shared::"))
    (_decode_tensor_load if to_shared else _decode_tensor_store)(d, inst, line)


def _decode_tensor_map_operand(d: PtxDecoder, inst: PtxInstruction, operand: PtxOperand) -> tuple[Reader, list[Reader]]:
    """The readers of a map's address and of its coordinates, innermost first."""
    assert isinstance(operand, AddressOperand) and operand.coordinates is not None
    if len(operand.coordinates) != int(inst.op[inst.op.index("tensor") + 1][0]):
        raise d.unsupported(inst)
    where = decode_address(d, inst, operand, "global")
    return where.read, [d.reader(c, TYPES["s32"]) for c in operand.coordinates]


def group_lanes_by_map(
    m: PtxMachine, lanes: LaneSet, read: Reader, rank: int, image: bool = False
) -> list[tuple[LaneSet, TensorMapBox]]:
    """The lanes by tensor map, which is one of images (im2col) or of boxes as the instruction is.

    Raises:
        PtxFault: it is of the other kind, or has another rank.
    """
    offsets = lanes.compress(
        check_address(m, "global", fill_masked_lanes(lanes, read(m, lanes)), lanes, _MAP_BYTES, 64)
    )
    kinds = np.unique(offsets).tolist()
    if len(kinds) == 1:
        return [(lanes, _decode_map_at(m, kinds[0], int(lanes.flat[0]), rank, image))]
    parts = [lanes.select(lanes.expand(offsets == k)) for k in kinds]
    return [
        (subset, _decode_map_at(m, k, int(subset.flat[0]), rank, image)) for subset, k in zip(parts, kinds, strict=True)
    ]


def _decode_map_at(m: PtxMachine, offset: int, lane: int, rank: int, image: bool) -> TensorMapBox:
    """The tensor map at an offset of global memory."""
    content = m.arena.flat.raw[offset : offset + _MAP_BYTES].tobytes()
    maps = m.state.setdefault("maps", {})
    box = maps[content] if content in maps else decode_tensor_map(content)
    if box is None:
        raise PtxFault("these 128 bytes are not a tensor map", AsyncCopyError, lane)
    maps[content] = box
    if len(box.sizes) != rank:
        raise PtxFault(f"a tensor map of {len(box.sizes)} dimensions has {rank} coordinates", AsyncCopyError, lane)
    if image != (box.corners is not None):
        kind, mode = ("boxes", "im2col") if image else ("images", "tile")
        raise PtxFault(f"a tensor map of {kind} in a copy in {mode} mode", AsyncCopyError, lane)
    return box


def _find_shared_starts(m: PtxMachine, lanes: LaneSet, where: AddressOperandReader, box: TensorMapBox) -> list[int]:
    """The start of each lane's box in shared memory."""
    offsets = check_address(
        m, "shared", fill_masked_lanes(lanes, where.read(m, lanes)), lanes, box.nbytes, _SHARED_ALIGNMENT
    )
    return lanes.compress(offsets).tolist()


def _find_tensor_offset(m: PtxMachine, box: TensorMapBox, lane: int) -> int:
    """The offset of the tensor in the arena."""
    start = box.address - GENERIC_WINDOWS["global"]
    if (translated := m.arena.translate(np.array([box.address], np.uint64), 1)) is not None:
        start = int(translated[0])
    if start < 0 or start >= m.arena.top:
        raise PtxFault(
            f"the tensor of a tensor map is at {box.address:#x}, which is not mapped", OutOfBoundsError, lane
        )
    return start


def _check_box_start(box: TensorMapBox, coordinates: tuple[int, ...], lane: int, is_store: bool) -> None:
    """Refuse what an H200 ends with an illegal instruction: a start inside 16 bytes, a store before 0."""
    if coordinates[0] * box.itemsize % _CHUNK:
        message = (
            f"a box that starts at column {coordinates[0]} of elements of {box.itemsize} bytes: not a multiple of 16"
        )
        raise PtxFault(message, AsyncCopyError, lane)
    if is_store and box.corners is None and min(coordinates) < 0:
        raise PtxFault(f"a box stored at negative coordinates {coordinates}", AsyncCopyError, lane)


def _decode_tensor_load(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    destination, barrier = (
        decode_address(d, inst, inst.operands[0], "shared"),
        decode_address(d, inst, inst.operands[2], "shared"),
    )
    read, axes = _decode_tensor_map_operand(d, inst, inst.operands[1])
    image = "im2col" in inst.op
    taps = _decode_taps(d, inst, len(axes)) if image else []
    mask = d.reader(inst.operands[3 + image], TYPES["b16"]) if "multicast::cluster" in inst.op else None

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        for subset, box in group_lanes_by_map(m, lanes, read, len(axes), image):
            barrier_offsets, starts = (
                find_mbarrier_offsets(m, subset, barrier).tolist(),
                _find_shared_starts(m, subset, destination, box),
            )
            masks = subset.compress(mask(m, subset)).tolist() if mask else [None] * len(barrier_offsets)
            each = zip(
                subset.flat.tolist(),
                _read_lane_coordinates(m, subset, axes),
                _read_lane_coordinates(m, subset, taps) if image else [()] * len(starts),
                starts,
                barrier_offsets,
                masks,
                strict=True,
            )
            for lane, coordinates, tap, start, barrier_offset, multicast in each:
                _check_box_start(box, coordinates, lane, is_store=False)
                content = _gather_box(m, box, coordinates, tap, lane)
                if m.observer is not None:
                    m.observer.transfer(m, box.nbytes, 0)
                for shift in find_multicast_offsets(m, lane, multicast):
                    _write_box_to_shared(
                        m, box, content, BulkTransfer(lane, 0, start + shift, box.nbytes), barrier_offset + shift
                    )

    line.step = step


def _decode_taps(d: PtxDecoder, inst: PtxInstruction, rank: int) -> list[Reader]:
    """The readers of the offsets that a copy of images adds to each pixel, innermost first."""
    parts = get_vector_parts(inst.operands[3]) if len(inst.operands) > 3 else ()
    if not 3 <= rank <= 5 or len(parts) != rank - 2:
        raise d.unsupported(inst)
    return [d.reader(p, TYPES["u16"]) for p in parts]


def _write_box_to_shared(
    m: PtxMachine, box: TensorMapBox, content: np.ndarray, copy: BulkTransfer, barrier: int
) -> None:
    """Write a box to shared memory and signal its bytes."""
    cells = m.flat["shared"].views[box.itemsize]
    cells[(copy.destination + _compute_shared_offsets(box, copy.destination % 1024)) // box.itemsize] = content
    if m.debug:
        record_bulk_transfer(m, copy, ("global", "shared"), 0, barrier)
    complete_transaction(m, barrier, box.nbytes)


def _read_lane_coordinates(m: PtxMachine, lanes: LaneSet, axes: list[Reader]) -> list[tuple[int, ...]]:
    """The coordinates of each lane."""
    return list(zip(*(lanes.compress(a(m, lanes)).tolist() for a in axes), strict=True))


def _gather_box(
    m: PtxMachine, box: TensorMapBox, coordinates: tuple[int, ...], taps: tuple[int, ...], lane: int
) -> np.ndarray:
    """The elements of a box, with the fill for elements out of bounds."""
    cells = m.arena.flat.views[box.itemsize]
    offsets, within = _locate_elements(box, coordinates, taps)
    offsets = offsets + _find_tensor_offset(m, box, lane)
    inside = offsets if within is None else offsets[within]
    if m.debug:
        where = inside[:, None] + np.arange(box.itemsize)
        m.global_shadow.require_initialised(m, where, np.full(len(where), lane))
    if within is None:
        return cells[offsets // box.itemsize]
    content = np.full(len(within), box.fill, cells.dtype)
    content[within] = cells[inside // box.itemsize]
    return content


def _decode_tensor_store(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """Elements out of bounds are not written."""
    read, axes = _decode_tensor_map_operand(d, inst, inst.operands[0])
    source = decode_address(d, inst, inst.operands[1], "shared")
    name = next((w for w in inst.op if w in BULK_REDUCTIONS), None)
    image = "im2col_no_offs" in inst.op

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        cells = m.flat["shared"].views
        for subset, box in group_lanes_by_map(m, lanes, read, len(axes), image):
            starts = _find_shared_starts(m, subset, source, box)
            for lane, coordinates, start in zip(
                subset.flat.tolist(), _read_lane_coordinates(m, subset, axes), starts, strict=True
            ):
                _check_box_start(box, coordinates, lane, is_store=True)
                content = cells[box.itemsize][(start + _compute_shared_offsets(box, start % 1024)) // box.itemsize]
                _scatter_box(m, box, coordinates, content, name, lane)
                if m.observer is not None:
                    m.observer.transfer(m, 0, box.nbytes)
                if m.debug:
                    record_bulk_transfer(m, BulkTransfer(lane, start, 0, box.nbytes), ("shared", "global"), 0, None)

    line.step = step


def _scatter_box(
    m: PtxMachine, box: TensorMapBox, coordinates: tuple[int, ...], content: np.ndarray, name: str | None, lane: int
) -> None:
    offsets, within = _locate_elements(box, coordinates, (0,) * (len(coordinates) - 2))
    cells, index = m.arena.flat.views[box.itemsize], (_find_tensor_offset(m, box, lane) + offsets) // box.itemsize
    if within is not None:
        content, index = content[within], index[within]
    if m.debug and m.global_shadow.known is not None:
        m.global_shadow.known[index[:, None] * box.itemsize + np.arange(box.itemsize)] = True
    if name is None:
        cells[index] = content
    else:
        reduce_cells(cells, index, content, name, TYPES[box.type])


# tensormap: fields replaced in shared or global memory, and the copy to global memory.


_TENSOR_MAP_BYTES = 128
# The ISA's numbers of element types, which differ from the driver's: types that flush subnormals have their own.
_ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32", "f64", "bf16", "f32", "f32")
# Field: the function from its value to entries (name, index, number) of the map.
_FIELDS: dict[str, Callable[[int, int], list[tuple[str, int, int]]]] = {
    "global_address": lambda offsets, v: [("address", 0, v)],
    "rank": lambda offsets, v: [("rank", 0, v + 1)],
    "box_dim": lambda offsets, v: [("box", offsets, v)],
    "global_dim": lambda offsets, v: [("sizes", offsets, v)],
    "global_stride": lambda offsets, v: [("strides", offsets, v)],
    "element_stride": lambda offsets, v: [("steps", offsets, v)],
    "elemtype": lambda offsets, v: [
        ("type", 0, TYPE_NAMES.index(_ELEMENTS[v])),
        ("itemsize", 0, TYPES[_ELEMENTS[v]].bits // 8),
    ],
    "swizzle_mode": lambda offsets, v: [("swizzle", 0, SWIZZLES[v])],
    "fill_mode": lambda offsets, v: [("fill", 0, v)],
    "interleave_layout": lambda offsets, v: [],
}
_ORDINAL = {"box_dim", "global_dim", "global_stride", "element_stride"}


@decode_rule("tensormap", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    {"replace": _decode_tensormap_replace, "cp_fenceproxy": _decode_tensormap_copy}[inst.op[1]](d, inst, line)


def _decode_tensormap_replace(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    (field,) = (w for w in inst.op if w in _FIELDS)
    where = decode_address(d, inst, inst.operands[0])
    require_known_modifiers(d, inst, "replace", "tile", "b1024", field)
    ordinal = inst.operands[1] if field in _ORDINAL else ImmediateOperand(0)
    assert isinstance(ordinal, ImmediateOperand)
    value = d.reader(inst.operands[-1], TYPES[inst.op[-1]])
    entries = _FIELDS[field]
    if field == "interleave_layout" and inst.operands[-1] != ImmediateOperand(0):
        raise d.unsupported(inst)

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        for access in resolve_accesses(m, lanes, where, _TENSOR_MAP_BYTES, 64):
            record_access(m, access, 8, "write")
            numbers = access.lanes.compress(value(m, access.lanes)).tolist()
            for start, number in zip(access.lanes.compress(access.offset).tolist(), numbers, strict=True):
                raw = m.flat[access.space].raw[start : start + _TENSOR_MAP_BYTES]
                for name, index, content in [("magic", 0, MAGIC), *entries(ordinal.value, number)]:
                    offset, letter = find_field(name, index)
                    packed = struct.pack(letter, content)
                    raw[offset : offset + len(packed)] = np.frombuffer(packed, np.uint8)

    line.step = step


def _decode_tensormap_copy(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """From shared to global memory, once for each warp."""
    destination, source = (
        decode_address(d, inst, inst.operands[0], "global"),
        decode_address(d, inst, inst.operands[1], "shared"),
    )
    line.group_size = 32

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        first = lanes.select(lanes.thread % 32 == 0)
        (multicast,), (read,) = (
            resolve_accesses(m, first, destination, _TENSOR_MAP_BYTES, 64),
            resolve_accesses(m, first, source, _TENSOR_MAP_BYTES, 64),
        )
        record_access(m, read, 8, "read")
        content = m.flat["shared"].raw[first.compress(read.offset)[:, None] + np.arange(_TENSOR_MAP_BYTES)]
        m.flat["global"].raw[first.compress(multicast.offset)[:, None] + np.arange(_TENSOR_MAP_BYTES)] = content

    line.step = step
