"""Staging buffers: swizzled slots of shared memory for ldmatrix, and asynchronous copies (cp.async) into them.

Eight rows that are read at once must lie in different banks: units of 16 bytes are swizzled within a row by the row's
last bits where rows are a power of two of bytes; other rows are padded. A copy moves 16, 8 or 4 bytes and fills zeros
outside its source; where neither side is contiguous enough, elements go through registers at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tessera.codegen.ptx.layout import DistributedLayout, Sizes, bit_width, make_blocked_layout
from tessera.codegen.ptx.ops import smem_operand, smem_slots
from tessera.codegen.ptx.passes.shared_memory_allocator import SHARED_SYMBOL
from tessera.codegen.ptx.table import emit_node
from tessera.codegen.ptx.table.scalars import packing
from tessera.codegen.ptx.text.memref import (
    VECTOR_BYTES,
    BlockAddress,
    PtxMemRef,
    VectorAccess,
    find_vector_length,
    load_block,
    plan_block_accesses,
    store_block,
)
from tessera.codegen.ptx.text.register_types import element_bytes
from tessera.codegen.ptx.text.thread_team import and_predicates
from tessera.core.types import GLOBAL
from tessera.ir.core import Node, Value
from tessera.ops.dialects import tile

if TYPE_CHECKING:
    from tessera.codegen.ptx.emitter import PtxEmitter


# Blocks in slots of shared memory as ldmatrix reads them, and where their pieces of 16 bytes lie.
#
# Eight rows that are read at once must lie in different banks: pieces change places within a row by the row's last bits
# where rows are a power of two of bytes; else rows are longer than they need be.


SWIZZLE_UNIT = 16  # bytes
BANK_BYTES = 128  # bytes of all banks
SLOT_ALIGN = 128


@dataclass(frozen=True)
class SwizzledRows:
    """How rows lie: the bytes from one to the next, and the pieces of row r swapped by `r >> shift & mask`."""

    pitch: int
    shift: int = 0
    mask: int = 0

    def turn(self, row: int) -> int:
        """What the byte within a row is changed by (exclusive or)."""
        return (row >> self.shift & self.mask) * SWIZZLE_UNIT

    def apart(self, row: int, byte: int) -> tuple[int, int]:
        """The place of a byte so far from a thread's first one: what is exclusive-or-ed to its address, then added."""
        within = BANK_BYTES - 1 if self.mask else 0
        return byte & within ^ self.turn(row), row * self.pitch + (byte & ~within)


def choose_row_layout(count: int) -> SwizzledRows:
    """Rows of so many bytes, a multiple of two pieces.

    >>> choose_row_layout(128), choose_row_layout(64), choose_row_layout(96)
    (SwizzledRows(pitch=128, shift=0, mask=7), SwizzledRows(pitch=64, shift=1, mask=3), SwizzledRows(pitch=112,
    shift=0, mask=0))
    """
    if count & (count - 1):
        return SwizzledRows(count + SWIZZLE_UNIT)
    bits = min(bit_width(count // SWIZZLE_UNIT), 3)
    return SwizzledRows(count, 3 - bits, (1 << bits) - 1)


@dataclass(frozen=True)
class SmemSlots:
    """The slots of one `slots`: a 32-bit address, the bytes of each, and how their rows lie."""

    base: str
    each: int
    rows: SwizzledRows
    bytes: int  # of an element


@emit_node(smem_slots)
def _(kernel: PtxEmitter, node: Node) -> None:
    text, dtype = kernel.text, node.attrs["dtype"]
    shape = tuple(int(n) for n in node.attrs["shape"])
    count, height, columns = shape[0], math.prod(shape[1:-1]), shape[-1]
    rows = (
        choose_row_layout(columns * element_bytes(dtype))
        if node.attrs["swizzled"]
        else SwizzledRows(columns * element_bytes(dtype))
    )
    offset = kernel.room.shared(count * height * rows.pitch, SLOT_ALIGN)
    with text.first():
        base = text.let("add.u32", "b32", text.let("mov.u32", "b32", SHARED_SYMBOL), offset)
        wide = text.let("cvt.u64.u32", "b64", base)
    kernel.slots[node.out] = SmemSlots(base, height * rows.pitch, rows, element_bytes(dtype))
    if not node.attrs["swizzled"]:
        kernel.memories[node.out] = PtxMemRef(dtype, "shared", wide, shape)


@emit_node(smem_operand)
def _(kernel, node):
    held = kernel.slots[node.args[0]]
    base = emit_slot_address(kernel, held, kernel.scalar_operand(node.args[1]))
    kernel.smem_operands[node.out] = SmemOperand(kernel, held, base, node.attrs["flipped"])
    kernel.values[node.out] = ()


def emit_slot_address(kernel: PtxEmitter, held: SmemSlots, slot: str) -> str:
    """The address of a slot."""
    if not slot.startswith("%"):
        return kernel.text.let("add.u32", "b32", held.base, int(slot) * held.each)
    narrow = kernel.text.let("cvt.u32.u64", "b32", slot)
    return kernel.text.let("mad.lo.u32", "b32", narrow, held.each, held.base)


@dataclass
class SmemOperand:
    """One slot under emission: addresses in it, each computed once."""

    kernel: PtxEmitter
    slots: SmemSlots
    base: str
    flipped: bool = False
    _known: dict[tuple[str, int], str] = field(default_factory=dict)

    def at(self, own: str, row: int, byte: int) -> str:
        """The place of a byte so far from a thread's own, as an operand."""
        address, more = self.place(own, row, byte)
        return f"[{address}+{more}]" if more else f"[{address}]"

    def place(self, own: str, row: int, byte: int) -> tuple[str, int]:
        """The same as a register and a number to add."""
        turned, more = self.slots.rows.apart(row, byte)
        text = self.kernel.text
        if (own, 0) not in self._known:
            self._known[own, 0] = text.let("add.u32", "b32", self.base, own) if own != "0" else self.base
        if (own, turned) not in self._known:
            self._known[own, turned] = text.let("xor.b32", "b32", self._known[own, 0], turned)
        return self._known[own, turned], more

    def own(self, layout: DistributedLayout, unit: int) -> str:
        """What a thread's place adds to a slot's address: `layout` gives its row and, times `unit`, its bytes."""
        team, rows = self.kernel.team, self.slots.rows
        row, place = (team.place(layout, axis) for axis in (0, 1))
        key = ("slot", row, place, unit, rows)
        byte = team.once((*key, "byte"), "mul.lo.u32", "b32", place, unit) if place != "0" else "0"
        if row == "0":
            return byte
        if rows.mask:
            turn = team.once((*key, "bits"), "bfe.u32", "b32", row, rows.shift, rows.mask.bit_length())
            turn = team.once((*key, "turn"), "shl.b32", "b32", turn, bit_width(SWIZZLE_UNIT))
            byte = team.once((*key, "turned"), "xor.b32", "b32", byte, turn)
        return team.once((*key, "own"), "mad.lo.u32", "b32", row, rows.pitch, byte)


def flatten_to_rows(layout: DistributedLayout) -> DistributedLayout:
    """The layout of a block with at most one axis beside the last as one of rows."""
    found = layout.reshaped((math.prod(layout.shape[:-1]), layout.shape[-1]))
    assert found is not None
    return found


def store_slot(kernel: PtxEmitter, held: SmemSlots, slot: str, value: Value) -> None:
    """Store a block of one slot's shape into a slot."""
    layout, dtype, team = kernel.layout(value), value.type.dtype, kernel.team  # type: ignore[union-attr]
    target = SmemOperand(kernel, held, emit_slot_address(kernel, held, slot))
    flat = flatten_to_rows(layout)
    own, length = target.own(flat, held.bytes), _contiguous_registers(flat, SWIZZLE_UNIT // held.bytes)
    for first in range(0, flat.count, length):
        row, column = flat.offsets[first]
        guard = and_predicates(kernel.text, team.owner(flat), *team.inside(flat, (row, column)))
        address, more = target.place(own, row, column * held.bytes)
        run = VectorAccess(0, length, address, more, (guard,) * length)
        packing.store_elements(kernel.text, "shared", dtype, run, kernel.values[value][first : first + length])


def _contiguous_registers(layout: DistributedLayout, most: int) -> int:
    """How many registers from the first on hold neighbours along a row, up to `most`, inside the block together."""
    length = 1
    for i, bit in enumerate(layout.registers):
        if bit != (1, i) or 2 * length > most or layout.shape[1] % (2 * length):
            break
        length *= 2
    return length


# Asynchronous copies of a block (cp.async): 16, 8 or 4 bytes at a time, zeros where the block lies outside its source.
#
# Where neighbours of so many bytes do not lie together on both sides, and between other kinds of memory, elements go
# through registers at once: what is done before the wait is allowed to be done already.


MIN_COPY_BYTES = 4  # bytes of a copy
CACHE_OPERATORS = {VECTOR_BYTES: "cg"}  # whole lines pass by the first cache


@dataclass(frozen=True)
class CopyEndpoints:
    """Both ends of a copy: memories and where the block begins in each; `to` is None where that is a slot."""

    node: Node
    to: PtxMemRef | None
    source: PtxMemRef
    starts: tuple[tuple[Value, ...], tuple[Value, ...]]

    @property
    def shape(self) -> Sizes:
        """The block's shape."""
        return tuple(int(n) for n in self.node.attrs["shape"])

    @property
    def clip(self) -> bool:
        """Whether what lies outside the source counts as 0."""
        return bool(self.node.attrs["edge"] == "clip")


@emit_node(tile.async_copy)
def _(kernel: PtxEmitter, node: Node) -> None:
    to, source, *starts = node.args
    rank = to.type.rank  # type: ignore[union-attr]
    places = (tuple(starts[:rank]), tuple(starts[rank:]))
    ends = CopyEndpoints(node, kernel.memories.get(to), kernel.memories[source], places)
    length = _find_copy_length(kernel, ends)
    if length:
        _AsyncCopyEmitter(kernel, ends, length).run()
    else:
        _copy_through_registers(kernel, ends)


@emit_node(tile.async_commit)
def _(kernel, node):
    kernel.text.do("cp.async.commit_group")


@emit_node(tile.async_wait)
def _(kernel, node):
    kernel.text.do("cp.async.wait_group", node.attrs["pending"])


def _find_copy_length(kernel: PtxEmitter, ends: CopyEndpoints) -> int:
    """The neighbours that one copy moves; 0 where copies cannot."""
    to, source, each = ends.to, ends.source, element_bytes(ends.source.dtype)
    if source.space != GLOBAL or (to is not None and to.space != "shared"):
        return 0
    length = VECTOR_BYTES // each
    for m, starts in zip((to, source), ends.starts, strict=True):
        if m is not None:
            length = find_vector_length(kernel.producers, m, starts, _pad_shape(ends.shape, len(m.shape)), length)
    while length > 1 and (ends.shape[-1] % length or (ends.clip and source.shape[-1] % length)):
        length //= 2
    return length if length * each >= MIN_COPY_BYTES else 0


class _AsyncCopyEmitter:
    """One copy under emission, by all threads of a team."""

    def __init__(self, kernel: PtxEmitter, ends: CopyEndpoints, length: int) -> None:
        self.kernel, self.text, self.ends, self.length = kernel, kernel.text, ends, length
        self.bytes = length * element_bytes(ends.source.dtype)
        self.layout = _make_copy_layout(ends.shape, kernel.team.threads, length)
        rank = len(ends.source.shape)
        self.seen = _pad_rank(self.layout, rank)
        self.source = BlockAddress(kernel, ends.source, ends.starts[1], self.seen)
        self._sizes: dict[str, str] = {}

    def run(self) -> None:
        """Each thread's pieces."""
        target = self._target()
        for first in range(0, self.layout.count, self.length):
            offset = self.layout.offsets[first]
            address, more = self.source.address(self.seen.offsets[first])
            place = f"[{address}+{more}]" if more else f"[{address}]"
            clips = self.source.clipped(self.seen.offsets[first]) if self.ends.clip else []
            present = self._present(self.source.joined(tuple(clips)))
            team = self.kernel.team
            guard = self.source.joined((team.owner(self.layout), *team.inside(self.layout, offset)))
            form = f"cp.async.{CACHE_OPERATORS.get(self.bytes, 'ca')}.shared.global"
            self.text.do(form, target(first), place, self.bytes, *present, guard=guard)

    def _present(self, clip: str) -> tuple[str, ...]:
        """The bytes to read of a piece, where that is not always all of it."""
        if not clip:
            return ()
        if clip not in self._sizes:
            self._sizes[clip] = self.text.let("selp.b32", "b32", self.bytes, 0, clip)
        return (self._sizes[clip],)

    def _target(self) -> Callable[[int], str]:
        """What gives the place that the element of a register is copied to."""
        ends, each = self.ends, element_bytes(self.ends.source.dtype)
        if ends.to is None:
            held = self.kernel.slots[ends.node.args[0]]
            lying = SmemOperand(
                self.kernel, held, emit_slot_address(self.kernel, held, self.kernel.scalar_operand(ends.starts[0][0]))
            )
            rows = flatten_to_rows(self.layout)
            own = lying.own(rows, each)
            return lambda first: lying.at(own, rows.offsets[first][0], rows.offsets[first][1] * each)
        seen = _pad_rank(self.layout, len(ends.to.shape))
        place = BlockAddress(self.kernel, ends.to, ends.starts[0], seen)

        def plain(first: int) -> str:
            address, more = place.address(seen.offsets[first])
            return f"[{address}+{more}]" if more else f"[{address}]"

        return plain


def _make_copy_layout(shape: Sizes, threads: int, length: int) -> DistributedLayout:
    """A block spread over threads by pieces of `length` neighbours; threads that none is left for hold the same."""
    count = 1
    for n in shape:
        count <<= bit_width(n)
    busy = min(threads, max(count // length, 1))
    found = make_blocked_layout(shape, busy, length)
    return DistributedLayout(
        shape, found.registers, (*found.threads, *(None,) * (bit_width(threads) - bit_width(busy)))
    )


def _pad_rank(layout: DistributedLayout, rank: int) -> DistributedLayout:
    """The layout with axes of size 1 put in front or left out."""
    moved = rank - len(layout.shape)
    names = {(a, p): (a + moved, p) for a, n in enumerate(layout.shape) for p in range(bit_width(n))}
    return layout.renamed(_pad_shape(layout.shape, rank), names)


def _copy_through_registers(kernel: PtxEmitter, ends: CopyEndpoints) -> None:
    """The copy as a load and a store."""
    assert ends.to is not None
    m, n = ends.to, ends.source
    layouts = [
        make_blocked_layout(_pad_shape(ends.shape, len(each.shape)), kernel.team.threads, kernel.vector)
        for each in (m, n)
    ]
    elements = load_block(
        kernel, n, plan_block_accesses(kernel, n, ends.starts[1], layouts[1], ends.clip, (), once=False)
    )
    store_block(kernel, m, plan_block_accesses(kernel, m, ends.starts[0], layouts[0], False, (), once=True), elements)


def _pad_shape(shape: Sizes, rank: int) -> Sizes:
    """A block's shape on the side of a memory of some rank: axes of size 1 put in front or left out."""
    return (1,) * (rank - len(shape)) + shape[max(0, len(shape) - rank) :]
