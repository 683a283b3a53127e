"""Epilogue: results of warp groups stored by TMA through swizzled shared memory (stmatrix), beside the next tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tessera.codegen.ptx.layout import make_wgmma_layout
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.mainloop import is_tma_fetchable
from tessera.codegen.ptx.table.scalars.packing import pack_halves
from tessera.codegen.ptx.table.warpgroup.producer import BOX_COLUMNS, TensorMapSpec
from tessera.codegen.ptx.table.warpgroup.wgmma import WARPGROUP_THREADS, WGMMA_ROWS
from tessera.ir.core import Node
from tessera.ops.dialects import tile

if TYPE_CHECKING:
    from tessera.codegen.ptx.emitter import PtxEmitter
    from tessera.codegen.ptx.text.thread_team import ThreadTeam

BOX_BYTES = BOX_COLUMNS * WGMMA_ROWS * 2  # bytes
BOXES_PER_ROUND = 2
BOX_ROW_BYTES = BOX_COLUMNS * 2
GROUP_BARRIER = 2  # of the first group; the ones before serve the whole block, and all groups


def staging_bytes(team: ThreadTeam) -> int:
    """The bytes of shared memory that the groups stage their results in."""
    return team.working // WARPGROUP_THREADS * BOXES_PER_ROUND * BOX_BYTES


def find_tma_stores(kernel: PtxEmitter, first: int) -> Iterator[tuple[Node, TensorMapSpec]]:
    """The stores at the function's top that copies can make, with their maps, numbered from `first`."""
    body, params = kernel.function.body, kernel.function.params
    touched = [n.args[0] for n in body.walk() if n.op.effects & {"read", "write"}]
    for node in body.nodes:
        if node.op is not tile.store or touched.count(node.args[0]) != 1:
            continue
        ref, value = node.args[:2]
        whole = len(node.args) == 2 + ref.type.rank and ref in params and is_tma_fetchable(ref.type)
        if whole and kernel.layout(value) == _fragment_layout(kernel, node):
            yield node, TensorMapSpec(first, params.index(ref), (1,) * (ref.type.rank - 2) + (WGMMA_ROWS, BOX_COLUMNS))
            first += 1


def _fragment_layout(kernel: PtxEmitter, node: Node) -> object:
    *outer, rows, columns = static_shape(node.args[1])
    fits = set(outer) <= {1} and rows >= WGMMA_ROWS and columns % BOX_COLUMNS == 0
    flat = make_wgmma_layout((rows, columns), kernel.team.threads) if fits else None
    return flat.reshaped(static_shape(node.args[1])) if flat is not None else None


class TmaStoreEmitter:
    """One such store under emission."""

    def __init__(self, kernel: PtxEmitter, node: Node, map_: str) -> None:
        assert kernel.ring is not None
        self.kernel, self.text, self.node, self.map = kernel, kernel.text, node, map_
        self.value = node.args[1]
        self.layout = kernel.layout(self.value)
        self.outer = (0,) * (len(self.layout.shape) - 2)
        self.groups = kernel.team.threads // WARPGROUP_THREADS
        team = kernel.team
        self.group = team.once(("group",), "shr.u32", "b32", team.thread, 7)
        rest = team.once(("in group",), "and.b32", "b32", team.thread, WARPGROUP_THREADS - 1)
        self.leader = team.once(("leader",), "setp.eq.u32", "pred", rest, 0)
        slot = self.group
        if team.teams > 1:
            slot = team.once(("slot",), "mad.lo.u32", "b32", team.index, self.groups, self.group)
        self.barrier = team.once(("group barrier",), "add.u32", "b32", slot, GROUP_BARRIER)
        own = team.once(("own room",), "mul.lo.u32", "b32", slot, BOXES_PER_ROUND * BOX_BYTES)
        staged = kernel.ring.size * kernel.ring.stages
        base = team.once(("rooms",), "add.u32", "b32", kernel.ring.base, staged)
        self.room = team.once(("room",), "add.u32", "b32", base, own)

    def run(self) -> None:
        """Round by round: as many boxes as there is room for."""
        rows, columns = self.layout.shape[-2:]
        every = [(part, c) for part in range(0, rows, WGMMA_ROWS * self.groups) for c in range(0, columns, BOX_COLUMNS)]
        for first in range(0, len(every), BOXES_PER_ROUND):
            boxes = every[first : first + BOXES_PER_ROUND]
            self.text.do("cp.async.bulk.wait_group.read", 0, guard=self.leader)
            self._meet()
            for number, (part, column) in enumerate(boxes):
                self._write_box(part, column, number * BOX_BYTES)
            self.text.do("fence.proxy.async.shared::cta")
            self._meet()
            for number, (part, column) in enumerate(boxes):
                self._copy(part, column, number * BOX_BYTES)
            self.text.do("cp.async.bulk.commit_group", guard=self.leader)

    def _meet(self) -> None:
        self.text.do("bar.sync", self.barrier, WARPGROUP_THREADS)

    def _write_box(self, part: int, column: int, offset: int) -> None:
        """A box into shared memory, 16 columns at a time."""
        held, dtype = self.kernel.values[self.value], self.value.type.dtype
        for chunk in range(BOX_COLUMNS // 16):
            words = []
            for across in (0, 8):
                for down in (0, 8):
                    row, first = part + down, column + 16 * chunk + across
                    places = [(*self.outer, row, first + n) for n in (0, 1)]
                    pair = [held[self.layout.index[place]] for place in places]
                    words.append(pack_halves(self.text, dtype, *pair))
            at = f"[{self._row_address(chunk)}+{offset}]"
            self.text.do("stmatrix.sync.aligned.m8n8.x4.shared.b16", at, f"{{{', '.join(words)}}}")

    def _row_address(self, chunk: int) -> str:
        """Where a thread's row of a box lies: 16 rows a warp, the 16-byte pieces swapped by the row's last bits."""
        team = self.kernel.team
        lane = team.once(("lane",), "and.b32", "b32", team.thread, 31)
        low = team.once(("lane row",), "and.b32", "b32", lane, 15)
        warp = team.once(("warp",), "bfe.u32", "b32", team.thread, 5, 2)
        row = team.once(("box row",), "mad.lo.u32", "b32", warp, 16, low)
        half = team.once(("half",), "shr.u32", "b32", lane, 4)
        piece = team.once(("piece", chunk), "add.u32", "b32", half, 2 * chunk)
        turn = team.once(("turn",), "and.b32", "b32", lane, 7)
        swapped = team.once(("swapped", chunk), "xor.b32", "b32", piece, turn)
        start = team.once(("box start",), "mad.lo.u32", "b32", row, BOX_ROW_BYTES, self.room)
        return team.once(("box place", chunk), "mad.lo.u32", "b32", swapped, 16, start)

    def _copy(self, part: int, column: int, offset: int) -> None:
        """Begin the copy of a box; what lies outside the memory is left out."""
        text, team = self.text, self.kernel.team
        starts = [self.kernel.scalar_operand(v) for v in self.node.args[2:]]
        places = [text.let("cvt.u32.u64", "b32", x) if x.startswith("%") else x for x in starts]
        own = team.once(("group rows",), "mul.lo.u32", "b32", self.group, WGMMA_ROWS)
        row = text.let("add.s32", "b32", own, places[-2])
        row = text.let("add.s32", "b32", row, part) if part else row
        last = text.let("add.s32", "b32", places[-1], column) if column else places[-1]
        inner_first = ", ".join([last, row, *reversed(places[:-2])])
        source = text.let("add.u32", "b32", self.room, offset) if offset else self.room
        form = f"cp.async.bulk.tensor.{len(places)}d.global.shared::cta.tile.bulk_group"
        text.do(form, f"[{self.map}, {{{inner_first}}}]", f"[{source}]", guard=self.leader)


def drain_stores(kernel: PtxEmitter) -> None:
    """Wait for the copies: shared memory lasts no longer than the block."""
    team = kernel.team
    rest = team.once(("in group",), "and.b32", "b32", team.thread, WARPGROUP_THREADS - 1)
    leader = team.once(("leader",), "setp.eq.u32", "pred", rest, 0)
    kernel.text.do("cp.async.bulk.wait_group", 0, guard=leader)
