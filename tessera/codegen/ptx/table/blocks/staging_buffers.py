"""Staging buffers: slots of shared memory for MMA operands, and asynchronous copies (cp.async) into memory.

A copy moves 16, 8 or 4 bytes and fills with zeros what is outside its source. Where neither side is contiguous enough,
or the copy is not from global to shared memory, the elements go through registers at once: a copy may complete early.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tessera.codegen.ptx.context import (
    SWIZZLE_UNIT,
    VECTOR_BYTES,
    EmissionContext,
    PtxMemRef,
    SmemOperand,
    SmemSlots,
    SwizzledRows,
    VectorAccess,
    choose_row_layout,
    find_vector_length,
    format_address,
)
from tessera.codegen.ptx.layout import DistributedLayout, Sizes, and_predicates, bit_width, make_blocked_layout
from tessera.codegen.ptx.ops import smem_operand, smem_slots
from tessera.codegen.ptx.passes.shared_memory import SHARED_SYMBOL
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks import block_access
from tessera.codegen.ptx.table.blocks.block_access import (
    BlockAddress,
    load_block,
    plan_block_accesses,
    store_block,
)
from tessera.codegen.ptx.text.builder import element_bytes
from tessera.core.types import GLOBAL
from tessera.ir.core import Node, Value
from tessera.ops.dialects import tile

SLOT_ALIGN = 128
MMA_ROWS = 16  # the most rows of an operand that one instruction reads
MIN_COPY_BYTES = 4
CACHE_OPERATORS = {VECTOR_BYTES: "cg"}  # 16-byte copies bypass the L1 cache


@emission_rule(smem_slots)
def _(ctx: EmissionContext, node: Node) -> None:
    text, dtype, swizzled, padding = ctx.text, node.attrs["dtype"], node.attrs["swizzled"], node.attrs["padding"]
    shape = tuple(int(n) for n in node.attrs["shape"])
    count, height, row_bytes = shape[0], math.prod(shape[1:-1]), shape[-1] * element_bytes(dtype)
    rows = choose_row_layout(row_bytes) if swizzled else SwizzledRows(row_bytes + padding)
    spare = _count_spare_bytes(height, row_bytes, rows.pitch) if swizzled or padding else 0
    offset = ctx.smem.allocator.allocate_shared(count * height * rows.pitch + spare, SLOT_ALIGN)
    with text.at_entry_head():
        base = text.let("add.u32", "b32", text.let("mov.u32", "b32", SHARED_SYMBOL), offset)
        wide = text.let("cvt.u64.u32", "b64", base)
    ctx.smem.slots[node.out] = SmemSlots(base, height * rows.pitch, rows, element_bytes(dtype))
    if not swizzled and not padding:
        ctx.memrefs[node.out] = PtxMemRef(dtype, "shared", wide, shape)


def _count_spare_bytes(height: int, row_bytes: int, pitch: int) -> int:
    """The bytes after the last slot that reads of it may touch: layouts and instructions have powers of two of rows."""
    rows = max(1 << bit_width(height), MMA_ROWS)
    return (rows - height) * pitch + (1 << bit_width(row_bytes)) - row_bytes


@emission_rule(smem_operand)
def _(ctx, node):
    ref, slot = node.args
    ctx.smem.operands[node.out] = _open_slot(ctx, ref, ctx.scalar_operand(slot), node.attrs["flipped"])
    ctx.values[node.out] = ()


def _open_slot(ctx: EmissionContext, ref: Value, slot: str, flipped: bool = False) -> SmemOperand:
    """The block in a slot, whose number is a register or an immediate."""
    slots, text = ctx.smem.slots[ref], ctx.text
    if slot.startswith("%"):
        number = text.let("cvt.u32.u64", "b32", slot)
        base = text.let("mad.lo.u32", "b32", number, slots.slot_bytes, slots.base)
    else:
        base = text.let("add.u32", "b32", slots.base, int(slot) * slots.slot_bytes)
    return SmemOperand(ctx.team, slots, base, flipped)


def _flatten_to_rows(layout: DistributedLayout) -> DistributedLayout:
    """The layout of a block with at most one axis of more than one element beside the last, as a matrix."""
    found = layout.reshaped((math.prod(layout.shape[:-1]), layout.shape[-1]))
    assert found is not None
    return found


def store_slot(ctx: EmissionContext, ref: Value, slot: Value, value: Value) -> None:
    """Store a block to a slot of its shape."""
    dtype, team, size = value.type.dtype, ctx.team, ctx.smem.slots[ref].element_bytes  # type: ignore[union-attr]
    target, layout = _open_slot(ctx, ref, ctx.scalar_operand(slot)), _flatten_to_rows(ctx.layout(value))
    thread = target.thread_address(layout, size)
    length = _count_contiguous_registers(layout, SWIZZLE_UNIT // size)
    for first in range(0, layout.count, length):
        row, column = layout.offsets[first]
        guard = and_predicates(
            ctx.text, team.owner_predicate(layout), *team.bounds_predicates(layout, (row, column))
        )  # fmt: skip
        address, offset = target.locate(thread, row, column * size)
        access = VectorAccess(0, length, address, offset, (guard,) * length)
        block_access.store_elements(ctx.text, "shared", dtype, access, ctx.values[value][first : first + length])


def _count_contiguous_registers(layout: DistributedLayout, most: int) -> int:
    """The leading registers, at most `most`, that hold neighbours of a row; all or none of them are padding."""
    length = 1
    for i, bit in enumerate(layout.registers):
        if bit != (1, i) or 2 * length > most or layout.shape[1] % (2 * length):
            break
        length *= 2
    return length


@dataclass(frozen=True)
class CopyEndpoints:
    """Target and source of a copy, and the indices at which the block begins in each; a slot has no memref."""

    node: Node
    target: PtxMemRef | None
    source: PtxMemRef
    starts: tuple[tuple[Value, ...], tuple[Value, ...]]

    @property
    def shape(self) -> Sizes:
        """The block's shape."""
        return tuple(int(n) for n in self.node.attrs["shape"])

    @property
    def clip(self) -> bool:
        """Whether elements outside the source read as 0."""
        return bool(self.node.attrs["edge"] == "clip")


@emission_rule(tile.async_copy)
def _(ctx: EmissionContext, node: Node) -> None:
    target, source, *starts = node.args
    rank = target.type.rank  # type: ignore[union-attr]
    indices = (tuple(starts[:rank]), tuple(starts[rank:]))
    ends = CopyEndpoints(node, ctx.memrefs.get(target), ctx.memrefs[source], indices)
    length = _find_copy_length(ctx, ends)
    if length:
        _AsyncCopyEmitter(ctx, ends, length).emit()
    else:
        _copy_through_registers(ctx, ends)


@emission_rule(tile.async_commit)
def _(ctx, node):
    ctx.text.do("cp.async.commit_group")


@emission_rule(tile.async_wait)
def _(ctx, node):
    ctx.text.do("cp.async.wait_group", node.attrs["pending"])


def _find_copy_length(ctx: EmissionContext, ends: CopyEndpoints) -> int:
    """The elements that one cp.async moves; 0 where it cannot make the copy."""
    target, source, size = ends.target, ends.source, element_bytes(ends.source.dtype)
    if source.space != GLOBAL or (target is not None and target.space != "shared"):
        return 0
    length = VECTOR_BYTES // size
    for m, starts in zip((target, source), ends.starts, strict=True):
        if m is not None:
            block = _pad_shape(ends.shape, len(m.shape))
            length = find_vector_length(ctx.analyses.producers, m, starts, block, length)
    while length > 1 and (ends.shape[-1] % length or (ends.clip and source.shape[-1] % length != 0)):
        length //= 2
    return length if length * size >= MIN_COPY_BYTES else 0


class _AsyncCopyEmitter:
    """One copy under emission, by all threads of a team."""

    def __init__(self, ctx: EmissionContext, ends: CopyEndpoints, length: int) -> None:
        self.ctx, self.text, self.ends, self.length = ctx, ctx.text, ends, length
        self.bytes = length * element_bytes(ends.source.dtype)
        self.layout = _make_copy_layout(ends.shape, ctx.team.threads, length)
        self.source_layout = _pad_rank(self.layout, len(ends.source.shape))
        self.source = BlockAddress(ctx, ends.source, ends.starts[1], self.source_layout)
        self._sizes: dict[str, str] = {}

    def emit(self) -> None:
        """Emit the copies of each thread."""
        target = self._locate_target()
        for first in range(0, self.layout.count, self.length):
            offset = self.layout.offsets[first]
            source = format_address(*self.source.locate(self.source_layout.offsets[first]))
            clips = self.source.clip_predicates(self.source_layout.offsets[first]) if self.ends.clip else []
            size = self._source_size(self.source.and_cached(tuple(clips)))
            team = self.ctx.team
            predicates = (team.owner_predicate(self.layout), *team.bounds_predicates(self.layout, offset))
            guard = self.source.and_cached(predicates)
            form = f"cp.async.{CACHE_OPERATORS.get(self.bytes, 'ca')}.shared.global"
            self.text.do(form, target(first), source, self.bytes, *size, guard=guard)

    def _source_size(self, clip: str) -> tuple[str, ...]:
        """The operand for the bytes to read, where elements may be out of bounds: the others are zeros."""
        if not clip:
            return ()
        if clip not in self._sizes:
            self._sizes[clip] = self.text.let("selp.b32", "b32", self.bytes, 0, clip)
        return (self._sizes[clip],)

    def _locate_target(self) -> Callable[[int], str]:
        """A function from a register of the layout to the address operand that its element is copied to."""
        ends, size = self.ends, element_bytes(self.ends.source.dtype)
        if ends.target is None:
            slot = _open_slot(self.ctx, ends.node.args[0], self.ctx.scalar_operand(ends.starts[0][0]))
            rows = _flatten_to_rows(self.layout)
            thread = slot.thread_address(rows, size)
            return lambda first: slot.operand_at(thread, rows.offsets[first][0], rows.offsets[first][1] * size)
        layout = _pad_rank(self.layout, len(ends.target.shape))
        target = BlockAddress(self.ctx, ends.target, ends.starts[0], layout)
        return lambda first: format_address(*target.locate(layout.offsets[first]))


def _make_copy_layout(shape: Sizes, threads: int, length: int) -> DistributedLayout:
    """A block distributed over threads by vectors of `length` elements; surplus threads hold replicas."""
    count = 1
    for n in shape:
        count <<= bit_width(n)
    busy = min(threads, max(count // length, 1))
    found = make_blocked_layout(shape, busy, length)
    replicas = (None,) * (bit_width(threads) - bit_width(busy))
    return DistributedLayout(shape, found.registers, (*found.threads, *replicas))


def _pad_rank(layout: DistributedLayout, rank: int) -> DistributedLayout:
    """The layout with leading axes of size 1 added or removed."""
    added = rank - len(layout.shape)
    names = {(a, p): (a + added, p) for a, n in enumerate(layout.shape) for p in range(bit_width(n))}
    return layout.renamed(_pad_shape(layout.shape, rank), names)


def _pad_shape(shape: Sizes, rank: int) -> Sizes:
    """The shape with leading axes of size 1 added or removed."""
    return (1,) * (rank - len(shape)) + shape[max(0, len(shape) - rank) :]


def _copy_through_registers(ctx: EmissionContext, ends: CopyEndpoints) -> None:
    """The copy as a load and a store."""
    assert ends.target is not None
    target, source = (
        make_blocked_layout(_pad_shape(ends.shape, len(m.shape)), ctx.team.threads, ctx.vector_width)
        for m in (ends.target, ends.source)
    )
    loads = plan_block_accesses(ctx, ends.source, ends.starts[1], source, ends.clip, (), once=False)
    elements = load_block(ctx, ends.source, loads)
    stores = plan_block_accesses(ctx, ends.target, ends.starts[0], target, False, (), once=True)
    store_block(ctx, ends.target, stores, elements)
