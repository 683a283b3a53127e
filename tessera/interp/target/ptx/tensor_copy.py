"""Copies of boxes of tensors by tensor maps, with swizzled shared memory and fill beyond the edges."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tessera.errors import AsyncCopyError, OutOfBoundsError
from tessera.interp.target.ptx.address import Target, fill, locate, target
from tessera.interp.target.ptx.async_copy import COPIES
from tessera.interp.target.ptx.atomics import reduce_cells
from tessera.interp.target.ptx.bulk_copy import REDUCTIONS, Copy, multicast, tell
from tessera.interp.target.ptx.decode import Decoder, rule
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Line, Machine
from tessera.interp.target.ptx.mbarrier import complete_bytes, places
from tessera.interp.target.ptx.memory import WINDOWS
from tessera.interp.target.ptx.operands import Reader
from tessera.interp.target.ptx.syntax import Address, Instruction, Operand
from tessera.interp.target.ptx.tensor_map import Box, decode
from tessera.interp.target.ptx.types import TYPES

_WORDS = {
    "async", "bulk", "tensor", "reduce", "shared::cluster", "shared::cta", "global", "tile", "bulk_group",
    "mbarrier::complete_tx::bytes", "multicast::cluster", "L2::cache_hint",
    "1d", "2d", "3d", "4d", "5d", *REDUCTIONS,
}  # fmt: skip
_SWIZZLE_BITS = {32: 1, 64: 3, 128: 7}  # which of the chunk bits 4 to 6 are flipped by bits 7 to 9
_MAP_BYTES = 128
_SHARED_ALIGNMENT = 128
_CHUNK = 16  # bytes


def swizzled(offset: np.ndarray, swizzle: int) -> np.ndarray:
    """Where bytes of shared memory lie: chunks of 16 bytes change places within their row.

    >>> swizzled(np.array([0, 128, 144, 1024]), 128).tolist()
    [0, 144, 128, 1024]
    """
    if not swizzle:
        return offset
    return offset ^ ((offset >> 7 & _SWIZZLE_BITS[swizzle]) << 4)


@lru_cache(maxsize=64)
def _elements(box: Box) -> tuple[np.ndarray, ...]:
    """For each element of a box, in the order of shared memory, its place in each dimension."""
    grids = np.meshgrid(
        *(np.arange(n) * s for n, s in zip(reversed(box.counts), reversed(box.steps), strict=True)), indexing="ij"
    )
    return tuple(g.reshape(-1) for g in reversed(grids))


@lru_cache(maxsize=64)
def _reach(box: Box) -> np.ndarray:
    """Byte offsets of a box's elements from its first."""
    total = np.zeros(int(np.prod(box.counts)), np.int64)
    for place, stride in zip(_elements(box), box.strides, strict=True):
        total += place * stride
    return total


@lru_cache(maxsize=64)
def _in_shared(box: Box, phase: int) -> np.ndarray:
    """Byte offsets of a box's elements in shared memory from its start, which lies at `phase` of a swizzle pattern."""
    linear = np.arange(int(np.prod(box.counts))) * box.itemsize
    return swizzled(linear + phase, box.swizzle) - phase


def inside(box: Box, coordinates: tuple[int, ...]) -> np.ndarray | None:
    """Which elements of a box lie within the tensor; None where all do."""
    last = [c + (n - 1) * s for c, n, s in zip(coordinates, box.counts, box.steps, strict=True)]
    if min(coordinates) >= 0 and all(e < n for e, n in zip(last, box.sizes, strict=True)):
        return None
    found = np.ones(int(np.prod(box.counts)), bool)
    for place, c, n in zip(_elements(box), coordinates, box.sizes, strict=True):
        found &= (place + c >= 0) & (place + c < n)
    return found


@rule("async.bulk.tensor", "reduce.async.bulk.tensor", table=COPIES)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    if not set(inst.op[1:]) <= _WORDS:
        raise d.unsupported(inst)
    to_shared = inst.op.index("global") > min(inst.op.index(w) for w in inst.op if w.startswith("shared::"))
    (_load if to_shared else _store)(d, inst, line)


def _map_operand(d: Decoder, inst: Instruction, operand: Operand) -> tuple[Reader, list[Reader]]:
    """What reads the address of a map, and its coordinates, innermost first."""
    assert isinstance(operand, Address) and operand.coordinates is not None
    if len(operand.coordinates) != int(inst.op[inst.op.index("tensor") + 1][0]):
        raise d.unsupported(inst)
    where = target(d, inst, operand, "global")
    return where.read, [d.reader(c, TYPES["s32"]) for c in operand.coordinates]


def by_map(m: Machine, lanes: Lanes, read: Reader, rank: int) -> list[tuple[Lanes, Box]]:
    """The lanes divided by the map they name."""
    at = lanes.compress(locate(m, "global", fill(lanes, read(m, lanes)), lanes, _MAP_BYTES, 64))
    kinds = np.unique(at).tolist()
    if len(kinds) == 1:
        return [(lanes, box_at(m, kinds[0], int(lanes.flat[0]), rank))]
    parts = [lanes.select(lanes.spread(at == k)) for k in kinds]
    return [(some, box_at(m, k, int(some.flat[0]), rank)) for some, k in zip(parts, kinds, strict=True)]


def box_at(m: Machine, offset: int, lane: int, rank: int) -> Box:
    """The map at an offset of global memory."""
    content = m.arena.flat.raw[offset : offset + _MAP_BYTES].tobytes()
    maps = m.state.setdefault("maps", {})
    box = maps[content] if content in maps else decode(content)
    if box is None:
        raise Fault("these 128 bytes are no tensor map", AsyncCopyError, lane)
    maps[content] = box
    if len(box.sizes) != rank:
        raise Fault(f"a map of {len(box.sizes)} dimensions, {rank} coordinates", AsyncCopyError, lane)
    return box


def _starts(m: Machine, lanes: Lanes, where: Target, box: Box) -> list[int]:
    """Where each lane's box begins in shared memory."""
    at = locate(m, "shared", fill(lanes, where.read(m, lanes)), lanes, box.nbytes, _SHARED_ALIGNMENT)
    return lanes.compress(at).tolist()


def _base(m: Machine, box: Box, coordinates: tuple[int, ...], lane: int) -> int:
    """The offset in the arena of the element at the coordinates, inside or not."""
    start = box.address - WINDOWS["global"]
    if start < 0 or start >= m.arena.top:
        raise Fault(f"a tensor map whose tensor lies at {box.address:#x}", OutOfBoundsError, lane)
    return start + sum(c * s for c, s in zip(coordinates, box.strides, strict=True))


def refuse(box: Box, coordinates: tuple[int, ...], lane: int, stores: bool) -> None:
    """What no manual says and an H200 ends with an illegal instruction: starts inside 16 bytes, stores before 0."""
    if coordinates[0] * box.itemsize % _CHUNK:
        says = f"a box that starts at column {coordinates[0]} of elements of {box.itemsize} bytes: not a multiple of 16"
        raise Fault(says, AsyncCopyError, lane)
    if stores and min(coordinates) < 0:
        raise Fault(f"a box stored at negative coordinates {coordinates}", AsyncCopyError, lane)


def _load(d: Decoder, inst: Instruction, line: Line) -> None:
    into, barrier = target(d, inst, inst.operands[0], "shared"), target(d, inst, inst.operands[2], "shared")
    read, axes = _map_operand(d, inst, inst.operands[1])
    mask = d.reader(inst.operands[3], TYPES["b16"]) if "multicast::cluster" in inst.op else None

    def step(m: Machine, lanes: Lanes) -> None:
        for some, box in by_map(m, lanes, read, len(axes)):
            bars, starts = places(m, some, barrier).tolist(), _starts(m, some, into, box)
            masks = some.compress(mask(m, some)).tolist() if mask else [None] * len(bars)
            each = zip(some.flat.tolist(), _points(m, some, axes), starts, bars, masks, strict=True)
            for lane, coordinates, start, bar, to in each:
                refuse(box, coordinates, lane, stores=False)
                content = _gathered(m, box, coordinates, lane)
                for shift in multicast(m, lane, to):
                    _place(m, box, content, Copy(lane, 0, start + shift, box.nbytes), bar + shift)

    line.step = step


def _place(m: Machine, box: Box, content: np.ndarray, copy: Copy, barrier: int) -> None:
    """Put a box into shared memory and count its bytes."""
    cells = m.flat["shared"].views[box.itemsize]
    cells[(copy.into + _in_shared(box, copy.into % 1024)) // box.itemsize] = content
    if m.debug:
        tell(m, copy, ("global", "shared"), 0, barrier)
    complete_bytes(m, barrier, box.nbytes)


def _points(m: Machine, lanes: Lanes, axes: list[Reader]) -> list[tuple[int, ...]]:
    """The coordinates of each lane."""
    return list(zip(*(lanes.compress(a(m, lanes)).tolist() for a in axes), strict=True))


def _gathered(m: Machine, box: Box, coordinates: tuple[int, ...], lane: int) -> np.ndarray:
    """A box's elements, with the fill where they lie outside."""
    cells, base = m.arena.flat.views[box.itemsize], _base(m, box, coordinates, lane)
    within = inside(box, coordinates)
    if within is None:
        return cells[(base + _reach(box)) // box.itemsize]
    content = np.full(len(within), box.fill, cells.dtype)
    content[within] = cells[(base + _reach(box)[within]) // box.itemsize]
    return content


def _store(d: Decoder, inst: Instruction, line: Line) -> None:
    """Elements outside the tensor are not written."""
    read, axes = _map_operand(d, inst, inst.operands[0])
    source = target(d, inst, inst.operands[1], "shared")
    name = next((w for w in inst.op if w in REDUCTIONS), None)

    def step(m: Machine, lanes: Lanes) -> None:
        cells = m.flat["shared"].views
        for some, box in by_map(m, lanes, read, len(axes)):
            starts = _starts(m, some, source, box)
            for lane, coordinates, start in zip(some.flat.tolist(), _points(m, some, axes), starts, strict=True):
                refuse(box, coordinates, lane, stores=True)
                content = cells[box.itemsize][(start + _in_shared(box, start % 1024)) // box.itemsize]
                _scatter(m, box, coordinates, content, name, lane)
                if m.debug:
                    tell(m, Copy(lane, start, 0, box.nbytes), ("shared", "global"), 0, None)

    line.step = step


def _scatter(
    m: Machine, box: Box, coordinates: tuple[int, ...], content: np.ndarray, name: str | None, lane: int
) -> None:
    cells, index = m.arena.flat.views[box.itemsize], (_base(m, box, coordinates, lane) + _reach(box)) // box.itemsize
    within = inside(box, coordinates)
    if within is not None:
        content, index = content[within], index[within]
    if name is None:
        cells[index] = content
    else:
        reduce_cells(cells, index, content, name, TYPES[box.type])
