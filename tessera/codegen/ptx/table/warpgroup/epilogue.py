"""Epilogue: warp groups store their results through swizzled shared memory (stmatrix).

Rows of whole units of 16 bytes are stored by TMA, under the next mainloop; others by the threads, whole rows side by
side: the fragments of an accumulator are pairs of elements in eight rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tessera.codegen.ptx.context import EmissionContext, VectorAccess
from tessera.codegen.ptx.layout import (
    WARPGROUP_THREADS,
    DistributedLayout,
    LayoutBit,
    ThreadTeam,
    bit_width,
    make_wgmma_layout,
)
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.mainloop import HALF_TYPES, find_row_axis, is_tma_fetchable
from tessera.codegen.ptx.table.blocks.block_access import pack_halves, plan_block_accesses
from tessera.codegen.ptx.table.warpgroup.ring_buffer import emit_group_leader
from tessera.codegen.ptx.table.warpgroup.tensor_map import (
    BOX_COLUMNS,
    SWIZZLE_ROW_BYTES,
    SWIZZLE_ROWS,
    WGMMA_ROWS,
    TensorMapSpec,
    make_box,
)
from tessera.ir.core import Node
from tessera.ops.dialects import tile

BOX_BYTES = BOX_COLUMNS * WGMMA_ROWS * 2
STORE_COLUMNS = 16  # of one stmatrix
BOXES_PER_ROUND = 2  # boxes that a warp group's staging buffer holds
UNIT, MOST_WORD = 8, 4  # elements of a swizzled unit of 16 bytes, and of the widest access to rows that are no units
GROUP_BARRIER = 2  # the named barrier of the first warp group; barriers 0 and 1 serve the block and all consumers


def staging_bytes(team: ThreadTeam) -> int:
    """The bytes of shared memory in which the warp groups stage their results."""
    return team.worker_threads // WARPGROUP_THREADS * BOXES_PER_ROUND * BOX_BYTES


def find_tma_stores(ctx: EmissionContext, first: int) -> Iterator[tuple[Node, TensorMapSpec]]:
    """The stores at the function's top level that TMA can make, with their descriptors, numbered from `first`."""
    body, params = ctx.function.body, ctx.function.params
    touched = [n.args[0] for n in body.walk() if n.op.effects & {"read", "write"}]
    for node in body.nodes:
        if node.op is not tile.store or touched.count(node.args[0]) != 1:
            continue
        ref, value = node.args[:2]
        whole = len(node.args) == 2 + ref.type.rank and ref in params and is_tma_fetchable(ref.type)
        if whole and ctx.layout(value) == _make_fragment_layout(ctx, node):
            box = make_box(ref.type.rank, _find_rows(node), WGMMA_ROWS)
            yield node, TensorMapSpec(first, params.index(ref), box)
            first += 1


def find_row_stores(ctx: EmissionContext) -> list[Node]:
    """The stores of accumulators at the function's top level to rows that TMA cannot make."""
    return [node for node in ctx.function.body.nodes if node.op is tile.store and _is_row_store(ctx, node)]


def _is_row_store(ctx: EmissionContext, node: Node) -> bool:
    ref, value = node.args[:2]
    if ref not in ctx.memrefs or len(node.args) != 2 + ref.type.rank:
        return False
    m = ctx.memrefs[ref]
    if m.space != "global" or m.dtype not in HALF_TYPES or not isinstance(m.shape[-1], int) or m.shape[-1] % 8 == 0:
        return False
    return ctx.layout(value) == _make_fragment_layout(ctx, node)


def _find_rows(node: Node) -> int:
    """The axis of a stored block's rows."""
    axis = find_row_axis(static_shape(node.args[1]))
    return -2 if axis is None else axis


def _make_fragment_layout(ctx: EmissionContext, node: Node) -> object:
    """The layout that a stored block must have: that of a wgmma accumulator."""
    block = static_shape(node.args[1])
    axis = find_row_axis(block)
    rows, columns = (0, 0) if axis is None else (block[axis], block[-1])
    fits = rows >= WGMMA_ROWS and columns >= BOX_COLUMNS and columns % STORE_COLUMNS == 0
    flat = make_wgmma_layout((rows, columns), ctx.team.threads) if fits else None
    return flat.reshaped(static_shape(node.args[1])) if flat is not None else None


class StagedStoreEmitter:
    """One store of an accumulator through shared memory, under emission."""

    def __init__(self, ctx: EmissionContext, node: Node) -> None:
        assert ctx.pipeline.ring is not None
        self.ctx, self.text, self.node = ctx, ctx.text, node
        self.value = node.args[1]
        self.layout = ctx.layout(self.value)
        self.axis = _find_rows(node)
        self.groups = ctx.team.threads // WARPGROUP_THREADS
        team, ring = ctx.team, ctx.pipeline.ring
        self.group = team.hoist(("group",), "shr.u32", "b32", team.thread, 7)
        slot = self.group
        if team.teams > 1:
            slot = team.hoist(("staging slot",), "mad.lo.u32", "b32", team.team_index, self.groups, self.group)
        self.barrier = team.hoist(("group barrier",), "add.u32", "b32", slot, GROUP_BARRIER)
        offset = team.hoist(("staging offset",), "mul.lo.u32", "b32", slot, BOXES_PER_ROUND * BOX_BYTES)
        base = team.hoist(("staging base",), "add.u32", "b32", ring.base, ring.size * ring.stages)
        self.buffer = team.hoist(("staging buffer",), "add.u32", "b32", base, offset)

    def emit(self) -> None:
        """Emit the rounds of the store: each stages as many boxes as the buffer holds and copies them."""
        rows, columns = self.layout.shape[self.axis], self.layout.shape[-1]
        # The last box of columns that are no whole boxes begins earlier: it stores some columns once more.
        starts = [min(c, columns - BOX_COLUMNS) for c in range(0, columns, BOX_COLUMNS)]
        parts = [(row, c) for row in range(0, rows, WGMMA_ROWS * self.groups) for c in starts]
        for first in range(0, len(parts), BOXES_PER_ROUND):
            boxes = parts[first : first + BOXES_PER_ROUND]
            self._begin_round()
            self._synchronise_group()
            for number, (row, column) in enumerate(boxes):
                self._stage_box(row, column, number * BOX_BYTES)
            self._end_staging()
            self._synchronise_group()
            for number, (row, column) in enumerate(boxes):
                self._copy_box(row, column, number * BOX_BYTES)
            self._end_round()

    def _begin_round(self) -> None:
        """Wait for what reads the buffer beside the group's threads."""

    def _end_staging(self) -> None:
        """Make what is staged visible to what copies it."""

    def _end_round(self) -> None:
        """Close the round's copies."""

    def _copy_box(self, row: int, column: int, offset: int) -> None:
        """Copy a box, which is staged `offset` bytes behind the buffer's start, to global memory."""
        raise NotImplementedError

    def _synchronise_group(self) -> None:
        self.text.do("bar.sync", self.barrier, WARPGROUP_THREADS)

    def _stage_box(self, row: int, column: int, offset: int) -> None:
        """Write a box to shared memory by stmatrix, 16 columns at a time."""
        held, dtype = self.ctx.values[self.value], self.value.type.dtype
        for chunk in range(BOX_COLUMNS // STORE_COLUMNS):
            words = []
            for across in (0, 8):
                for down in (0, 8):
                    first = column + STORE_COLUMNS * chunk + across
                    pair = [held[self.layout.index[self._place(row + down, first + n)]] for n in (0, 1)]
                    words.append(pack_halves(self.text, dtype, *pair))
            address = f"[{self._emit_row_address(chunk)}+{offset}]"
            self.text.do("stmatrix.sync.aligned.m8n8.x4.shared.b16", address, f"{{{', '.join(words)}}}")

    def _place(self, row: int, column: int) -> tuple[int, ...]:
        """The index of an element of the stored block."""
        return tuple({self.axis: row, -1: column}.get(i, 0) for i in range(-len(self.layout.shape), 0))

    def _emit_row_address(self, chunk: int) -> str:
        """The address of a thread's row of a box: 16 rows for each warp, 16-byte units swizzled by the row number."""
        team = self.ctx.team
        lane = team.hoist(("lane",), "and.b32", "b32", team.thread, 31)
        low = team.hoist(("lane row",), "and.b32", "b32", lane, 15)
        warp = team.hoist(("warp",), "bfe.u32", "b32", team.thread, 5, 2)
        row = team.hoist(("box row",), "mad.lo.u32", "b32", warp, 16, low)
        half = team.hoist(("half",), "shr.u32", "b32", lane, 4)
        unit = team.hoist(("unit", chunk), "add.u32", "b32", half, 2 * chunk)
        swizzle = team.hoist(("swizzle",), "and.b32", "b32", lane, 7)
        swizzled = team.hoist(("swizzled", chunk), "xor.b32", "b32", unit, swizzle)
        start = team.hoist(("row start",), "mad.lo.u32", "b32", row, SWIZZLE_ROW_BYTES, self.buffer)
        return team.hoist(("unit address", chunk), "mad.lo.u32", "b32", swizzled, 16, start)


class TmaStoreEmitter(StagedStoreEmitter):
    """A store by TMA, whose leader's threads begin the copies."""

    def __init__(self, ctx: EmissionContext, node: Node, tensor_map: str) -> None:
        super().__init__(ctx, node)
        self.tensor_map, self.leader = tensor_map, emit_group_leader(ctx.team)

    def _begin_round(self) -> None:
        self.text.do("cp.async.bulk.wait_group.read", 0, guard=self.leader)

    def _end_staging(self) -> None:
        self.text.do("fence.proxy.async.shared::cta")

    def _end_round(self) -> None:
        self.text.do("cp.async.bulk.commit_group", guard=self.leader)

    def _copy_box(self, row: int, column: int, offset: int) -> None:
        """Begin the copy of a box to global memory; TMA clips what is out of bounds."""
        text, team = self.text, self.ctx.team
        starts = [self.ctx.scalar_operand(v) for v in self.node.args[2:]]
        narrow = [text.let("cvt.u32.u64", "b32", x) if x.startswith("%") else x for x in starts]
        group_rows = team.hoist(("group rows",), "mul.lo.u32", "b32", self.group, WGMMA_ROWS)
        first_row = text.let("add.s32", "b32", group_rows, narrow[self.axis])
        narrow[self.axis] = text.let("add.s32", "b32", first_row, row) if row else first_row
        narrow[-1] = text.let("add.s32", "b32", narrow[-1], column) if column else narrow[-1]
        inner_first = ", ".join(reversed(narrow))
        source = text.let("add.u32", "b32", self.buffer, offset) if offset else self.buffer
        form = f"cp.async.bulk.tensor.{len(narrow)}d.global.shared::cta.tile.bulk_group"
        text.do(form, f"[{self.tensor_map}, {{{inner_first}}}]", f"[{source}]", guard=self.leader)


class RowStoreEmitter(StagedStoreEmitter):
    """A store by the threads of each warp group, which write its rows as they lie in memory."""

    def __init__(self, ctx: EmissionContext, node: Node) -> None:
        super().__init__(ctx, node)
        memory = ctx.memrefs[node.args[0]]
        assert isinstance(memory.shape[-1], int)
        flat, vector = (self.layout.shape[self.axis], self.layout.shape[-1]), math.gcd(memory.shape[-1], MOST_WORD)
        rows = make_row_layout(flat, ctx.team.threads, vector).reshaped(self.layout.shape)
        assert rows is not None
        self.rows = rows
        clip = node.attrs["edge"] == "clip"
        self.accesses = plan_block_accesses(ctx, memory, node.args[2:], rows, clip, (), once=True)

    def _copy_box(self, row: int, column: int, offset: int) -> None:
        for access in self.accesses:
            place = self.rows.offsets[access.first]
            down, across = place[self.axis] - row, place[-1] - column
            if 0 <= down < WGMMA_ROWS * self.groups and 0 <= across < BOX_COLUMNS:
                self._copy_run(access, down, across, offset)

    def _copy_run(self, access: VectorAccess, down: int, across: int, offset: int) -> None:
        """Copy neighbours of a row: one access where they have one guard."""
        count = access.count if len(set(access.guards)) == 1 else 1
        for i in range(0, access.count, count):
            source = f"[{self._emit_unit_address(down, across + i)}+{offset + self._find_distance(down, across + i)}]"
            kind = f"b{16 * count}"
            value = self.text.let(f"ld.shared.{kind}", kind, source)
            target = f"[{access.address}+{access.offset + 2 * i}]"
            self.text.do(f"st.global.{kind}", target, value, guard=access.guards[i])

    @staticmethod
    def _find_distance(down: int, across: int) -> int:
        """The bytes from a thread's first element in a unit to the one so many rows and columns on."""
        return down * SWIZZLE_ROW_BYTES + 2 * (across % UNIT)

    def _emit_unit_address(self, down: int, across: int) -> str:
        """The address of a thread's element in the swizzled unit so many rows and columns on."""
        team, turn = self.ctx.team, across // UNIT ^ down % SWIZZLE_ROWS

        def hoist(name: str, instruction: str, *operands: object) -> str:
            return team.hoist(("row store", self.rows.threads, name), instruction, "b32", *operands)

        axes = range(len(self.rows.shape))
        row = hoist("row", "and.b32", team.thread_offset(self.rows, axes[self.axis]), WGMMA_ROWS - 1)
        column = team.thread_offset(self.rows, axes[-1])
        unit = hoist("unit", "shr.u32", column, UNIT.bit_length() - 1)
        own = hoist("own unit", "xor.b32", unit, hoist("low row", "and.b32", row, SWIZZLE_ROWS - 1))
        start = hoist("row start", "mad.lo.u32", row, SWIZZLE_ROW_BYTES, self.buffer)
        first = hoist("start", "mad.lo.u32", hoist("column", "and.b32", column, UNIT - 1), 2, start)
        turned = hoist(f"unit {turn}", "xor.b32", own, turn)
        return hoist(f"address {turn}", "mad.lo.u32", turned, 2 * UNIT, first)


def make_row_layout(shape: tuple[int, int], threads: int, vector: int) -> DistributedLayout:
    """Rows of a wgmma accumulator's blocks of 64 rows, each in its own warp group: a warp has 64 columns of 16 rows.

    A thread has `vector` neighbours; the lanes, columns side by side.

    >>> print(make_row_layout((64, 128), 128, 2))
    64x128 registers [1.0 0.0 0.1 0.2 0.3 1.6] threads [1.1 1.2 1.3 1.4 1.5 0.4 0.5]
    """
    own = bit_width(vector)
    inside: list[LayoutBit] = [*((1, p) for p in range(own, bit_width(BOX_COLUMNS))), *((0, p) for p in range(4))]
    warps: list[LayoutBit] = [(0, p) for p in range(4, 4 + bit_width(threads // 32))]
    more = [(1, p) for p in range(bit_width(BOX_COLUMNS), bit_width(shape[1]))]
    down = [(0, p) for p in range(4 + len(warps), bit_width(shape[0]))]
    held = ((1, p) for p in range(own))
    return DistributedLayout(shape, (*held, *inside[5:], *more, *down), (*inside[:5], *warps))


def drain_stores(ctx: EmissionContext) -> None:
    """Wait for the stores before the block exits and its shared memory is freed."""
    ctx.text.do("cp.async.bulk.wait_group", 0, guard=emit_group_leader(ctx.team))
