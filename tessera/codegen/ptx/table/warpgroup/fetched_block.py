"""Fetched blocks: threads read their elements of a block from stages of the ring, where TMA copies have put it.

A stage holds `FETCHED_DEPTH` elements of the contraction for each row of the block, in boxes with the 128-byte swizzle.
A warp group releases the stage when all of its threads have read.
"""

from __future__ import annotations

from tessera.codegen.ptx.context import BANK_BYTES, EmissionContext, SwizzledRows, format_address
from tessera.codegen.ptx.layout import WARPGROUP_THREADS, DistributedLayout, bit_width
from tessera.codegen.ptx.ops import fetched_block
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.warpgroup.epilogue import GROUP_BARRIER
from tessera.codegen.ptx.table.warpgroup.ring_buffer import release_stage
from tessera.codegen.ptx.table.warpgroup.tensor_map import FETCHED_DEPTH, SWIZZLE_ROW_BYTES, SWIZZLE_ROWS, box_columns
from tessera.codegen.ptx.text.builder import element_bytes
from tessera.ir.core import Node

ROWS = SwizzledRows(SWIZZLE_ROW_BYTES, 0, SWIZZLE_ROWS - 1)


@emission_rule(fetched_block)
def _(ctx: EmissionContext, node: Node) -> None:
    FetchedBlockReader(ctx, node).emit()


class FetchedBlockReader:
    """The reads of one fetched block: an element's row and column in memory, and the box of the column."""

    def __init__(self, ctx: EmissionContext, node: Node) -> None:
        self.ctx, self.text, self.node = ctx, ctx.text, node
        self.turned, self.bytes = node.attrs["turned"], element_bytes(node.out.type.dtype)  # type: ignore[union-attr]
        layout = ctx.layout(node.out)
        self.layout: DistributedLayout = layout.permuted((1, 0)) if self.turned else layout
        self.width = box_columns(node)
        self.box_bytes = (FETCHED_DEPTH if self.turned else self.layout.shape[0]) * SWIZZLE_ROW_BYTES
        self.pair = not self.turned and self.layout.registers[:1] == ((1, 0),)

    def emit(self) -> None:
        """Wait for each stage, read from it and release it."""
        ctx, state = self.ctx, self.ctx.pipeline.state
        assert state is not None
        held = [""] * self.layout.count
        along = 0 if self.turned else 1  # the axis of the contraction in memory
        for first in range(0, self.layout.shape[along], FETCHED_DEPTH):
            ctx.pipeline.wait_for_stage()
            start = self.text.let("add.u32", "b32", state.buffer(), self._thread_offset())
            addresses = {0: start}
            for number, place in enumerate(self.layout.offsets):
                if first <= place[along] < first + FETCHED_DEPTH and not held[number]:
                    place = tuple(n - first if axis == along else n for axis, n in enumerate(place))
                    self._read(addresses, held, number, *place)
            # The reads are complete before a copy may overwrite the stage.
            self.text.do("fence.proxy.async.shared::cta")
            self._synchronise_group()
            release_stage(ctx.team, state.ring, state.stage)
            state.advance()
        ctx.values[self.node.out] = tuple(held)

    def _synchronise_group(self) -> None:
        team = self.ctx.team
        group = team.hoist(("group",), "shr.u32", "b32", team.thread, bit_width(WARPGROUP_THREADS))
        barrier = team.hoist(("group barrier",), "add.u32", "b32", group, GROUP_BARRIER)
        self.text.do("bar.sync", barrier, WARPGROUP_THREADS)

    def _read(self, addresses: dict[int, str], held: list[str], number: int, row: int, column: int) -> None:
        """Read a register, or a pair of neighbours, at a distance from the thread's first element."""
        box, inside = divmod(column, self.width)
        swizzled, added = ROWS.split_offset(row, inside * self.bytes)
        if swizzled not in addresses:
            addresses[swizzled] = self.text.let("xor.b32", "b32", addresses[0], swizzled)
        address = format_address(addresses[swizzled], added + box * self.box_bytes)
        if self.pair:
            both = [self.text.new("f32") for _ in range(2)]
            self.text.do("ld.shared.v2.f32", f"{{{', '.join(both)}}}", address)
            held[number : number + 2] = both
        else:
            held[number] = self.text.let("ld.shared.f32", "f32", address)

    def _thread_offset(self) -> str:
        """The offset of a thread's first element in a stage."""
        team, shift = self.ctx.team, bit_width(self.bytes)
        row, column = (team.thread_offset(self.layout, axis) for axis in (0, 1))
        key = ("fetched", row, column, self.box_bytes)
        total = "0"
        if column != "0":
            inside = team.hoist((*key, "inside"), "and.b32", "b32", column, self.width - 1)
            total = team.hoist((*key, "byte"), "shl.b32", "b32", inside, shift)
        if row != "0":
            bits = team.hoist((*key, "bits"), "and.b32", "b32", row, SWIZZLE_ROWS - 1)
            swizzle = team.hoist((*key, "swizzle"), "shl.b32", "b32", bits, bit_width(BANK_BYTES // SWIZZLE_ROWS))
            total = team.hoist((*key, "swizzled"), "xor.b32", "b32", swizzle, total)
            total = team.hoist((*key, "address"), "mad.lo.u32", "b32", row, SWIZZLE_ROW_BYTES, total)
        if self.layout.max_thread_offset(1) >= self.width:
            box = team.hoist((*key, "box"), "shr.u32", "b32", column, bit_width(self.width))
            total = team.hoist((*key, "boxes"), "mad.lo.u32", "b32", box, self.box_bytes, total)
        return total
