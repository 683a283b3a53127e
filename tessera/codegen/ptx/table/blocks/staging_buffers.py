"""Staging buffers: swizzled slots of shared memory for ldmatrix, and asynchronous copies (cp.async) into them.

Eight rows that are read at once must lie in different banks: units of 16 bytes are swizzled within a row by the row's
last bits where rows are a power of two of bytes; other rows are padded. A copy moves 16, 8 or 4 bytes and fills zeros
outside its source; where neither side is contiguous enough, elements go through registers at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tessera.codegen.ptx.context import EmissionContext
from tessera.codegen.ptx.layout import DistributedLayout, Sizes, bit_width, make_blocked_layout
from tessera.codegen.ptx.ops import smem_operand, smem_slots
from tessera.codegen.ptx.passes.shared_memory_allocator import SHARED_SYMBOL
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks.block_access import BlockAddress, load_block, plan_block_accesses, store_block
from tessera.codegen.ptx.table.scalars import packing
from tessera.codegen.ptx.text.memref import (
    SWIZZLE_UNIT,
    VECTOR_BYTES,
    PtxMemRef,
    SmemOperand,
    SmemSlots,
    SwizzledRows,
    VectorAccess,
    choose_row_layout,
    find_vector_length,
)
from tessera.codegen.ptx.text.register_types import element_bytes
from tessera.codegen.ptx.text.thread_team import and_predicates
from tessera.core.types import GLOBAL
from tessera.ir.core import Node, Value
from tessera.ops.dialects import tile

# Blocks in slots of shared memory as ldmatrix reads them, and where their pieces of 16 bytes lie.
#
# Eight rows that are read at once must lie in different banks: pieces change places within a row by the row's last bits
# where rows are a power of two of bytes; else rows are longer than they need be.


SLOT_ALIGN = 128


@emission_rule(smem_slots)
def _(ctx: EmissionContext, node: Node) -> None:
    text, dtype = ctx.text, node.attrs["dtype"]
    shape = tuple(int(n) for n in node.attrs["shape"])
    count, height, columns = shape[0], math.prod(shape[1:-1]), shape[-1]
    rows = (
        choose_row_layout(columns * element_bytes(dtype))
        if node.attrs["swizzled"]
        else SwizzledRows(columns * element_bytes(dtype))
    )
    offset = ctx.smem.allocator.shared(count * height * rows.pitch, SLOT_ALIGN)
    with text.at_entry_head():
        base = text.let("add.u32", "b32", text.let("mov.u32", "b32", SHARED_SYMBOL), offset)
        wide = text.let("cvt.u64.u32", "b64", base)
    ctx.smem.slots[node.out] = SmemSlots(base, height * rows.pitch, rows, element_bytes(dtype))
    if not node.attrs["swizzled"]:
        ctx.memrefs[node.out] = PtxMemRef(dtype, "shared", wide, shape)


@emission_rule(smem_operand)
def _(ctx, node):
    held = ctx.smem.slots[node.args[0]]
    base = emit_slot_address(ctx, held, ctx.scalar_operand(node.args[1]))
    ctx.smem.operands[node.out] = SmemOperand(ctx.team, held, base, node.attrs["flipped"])
    ctx.values[node.out] = ()


def emit_slot_address(ctx: EmissionContext, held: SmemSlots, slot: str) -> str:
    """The address of a slot."""
    if not slot.startswith("%"):
        return ctx.text.let("add.u32", "b32", held.base, int(slot) * held.slot_bytes)
    narrow = ctx.text.let("cvt.u32.u64", "b32", slot)
    return ctx.text.let("mad.lo.u32", "b32", narrow, held.slot_bytes, held.base)


def flatten_to_rows(layout: DistributedLayout) -> DistributedLayout:
    """The layout of a block with at most one axis beside the last as one of rows."""
    found = layout.reshaped((math.prod(layout.shape[:-1]), layout.shape[-1]))
    assert found is not None
    return found


def store_slot(ctx: EmissionContext, held: SmemSlots, slot: str, value: Value) -> None:
    """Store a block of one slot's shape into a slot."""
    layout, dtype, team = ctx.layout(value), value.type.dtype, ctx.team  # type: ignore[union-attr]
    target = SmemOperand(ctx.team, held, emit_slot_address(ctx, held, slot))
    flat = flatten_to_rows(layout)
    own, length = (
        target.thread_address(flat, held.element_bytes),
        _contiguous_registers(flat, SWIZZLE_UNIT // held.element_bytes),
    )
    for first in range(0, flat.count, length):
        row, column = flat.offsets[first]
        guard = and_predicates(ctx.text, team.owner_predicate(flat), *team.bounds_predicates(flat, (row, column)))
        address, more = target.locate(own, row, column * held.element_bytes)
        run = VectorAccess(0, length, address, more, (guard,) * length)
        packing.store_elements(ctx.text, "shared", dtype, run, ctx.values[value][first : first + length])


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


@emission_rule(tile.async_copy)
def _(ctx: EmissionContext, node: Node) -> None:
    to, source, *starts = node.args
    rank = to.type.rank  # type: ignore[union-attr]
    places = (tuple(starts[:rank]), tuple(starts[rank:]))
    ends = CopyEndpoints(node, ctx.memrefs.get(to), ctx.memrefs[source], places)
    length = _find_copy_length(ctx, ends)
    if length:
        _AsyncCopyEmitter(ctx, ends, length).run()
    else:
        _copy_through_registers(ctx, ends)


@emission_rule(tile.async_commit)
def _(ctx, node):
    ctx.text.do("cp.async.commit_group")


@emission_rule(tile.async_wait)
def _(ctx, node):
    ctx.text.do("cp.async.wait_group", node.attrs["pending"])


def _find_copy_length(ctx: EmissionContext, ends: CopyEndpoints) -> int:
    """The neighbours that one copy moves; 0 where copies cannot."""
    to, source, each = ends.to, ends.source, element_bytes(ends.source.dtype)
    if source.space != GLOBAL or (to is not None and to.space != "shared"):
        return 0
    length = VECTOR_BYTES // each
    for m, starts in zip((to, source), ends.starts, strict=True):
        if m is not None:
            length = find_vector_length(ctx.analyses.producers, m, starts, _pad_shape(ends.shape, len(m.shape)), length)
    while length > 1 and (ends.shape[-1] % length or (ends.clip and source.shape[-1] % length)):
        length //= 2
    return length if length * each >= MIN_COPY_BYTES else 0


class _AsyncCopyEmitter:
    """One copy under emission, by all threads of a team."""

    def __init__(self, ctx: EmissionContext, ends: CopyEndpoints, length: int) -> None:
        self.ctx, self.text, self.ends, self.length = ctx, ctx.text, ends, length
        self.bytes = length * element_bytes(ends.source.dtype)
        self.layout = _make_copy_layout(ends.shape, ctx.team.threads, length)
        rank = len(ends.source.shape)
        self.seen = _pad_rank(self.layout, rank)
        self.source = BlockAddress(ctx, ends.source, ends.starts[1], self.seen)
        self._sizes: dict[str, str] = {}

    def run(self) -> None:
        """Each thread's pieces."""
        target = self._target()
        for first in range(0, self.layout.count, self.length):
            offset = self.layout.offsets[first]
            address, more = self.source.locate(self.seen.offsets[first])
            place = f"[{address}+{more}]" if more else f"[{address}]"
            clips = self.source.clip_predicates(self.seen.offsets[first]) if self.ends.clip else []
            present = self._present(self.source.and_cached(tuple(clips)))
            team = self.ctx.team
            guard = self.source.and_cached(
                (team.owner_predicate(self.layout), *team.bounds_predicates(self.layout, offset))
            )
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
            held = self.ctx.smem.slots[ends.node.args[0]]
            lying = SmemOperand(
                self.ctx.team, held, emit_slot_address(self.ctx, held, self.ctx.scalar_operand(ends.starts[0][0]))
            )
            rows = flatten_to_rows(self.layout)
            own = lying.thread_address(rows, each)
            return lambda first: lying.operand_at(own, rows.offsets[first][0], rows.offsets[first][1] * each)
        seen = _pad_rank(self.layout, len(ends.to.shape))
        place = BlockAddress(self.ctx, ends.to, ends.starts[0], seen)

        def plain(first: int) -> str:
            address, more = place.locate(seen.offsets[first])
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


def _copy_through_registers(ctx: EmissionContext, ends: CopyEndpoints) -> None:
    """The copy as a load and a store."""
    assert ends.to is not None
    m, n = ends.to, ends.source
    layouts = [
        make_blocked_layout(_pad_shape(ends.shape, len(each.shape)), ctx.team.threads, ctx.vector_width)
        for each in (m, n)
    ]
    elements = load_block(ctx, n, plan_block_accesses(ctx, n, ends.starts[1], layouts[1], ends.clip, (), once=False))
    store_block(ctx, m, plan_block_accesses(ctx, m, ends.starts[0], layouts[0], False, (), once=True), elements)


def _pad_shape(shape: Sizes, rank: int) -> Sizes:
    """A block's shape on the side of a memory of some rank: axes of size 1 put in front or left out."""
    return (1,) * (rank - len(shape)) + shape[max(0, len(shape) - rank) :]
