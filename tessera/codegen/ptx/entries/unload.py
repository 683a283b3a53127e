"""Results of warp groups stored by tensor-map copies: through shared memory, while the next program begins.

Each group has room for a few boxes of 64 by 64. It writes them by stmatrix in the places that the 128-byte swizzle
asks for, and one of its threads begins the copies; before the room is written again they must have read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tessera.codegen.ptx.entries.fetch import INNER, Map
from tessera.codegen.ptx.entries.warpgroup import GROUP, HEIGHT
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.pipeline import fetched
from tessera.codegen.ptx.passes.products import group_fragments
from tessera.codegen.ptx.scalars.words import half_words
from tessera.ir.core import Node
from tessera.ops import tile

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel
    from tessera.codegen.ptx.team import Team

BOX = INNER * HEIGHT * 2  # bytes
BOXES = 2
ROW = INNER * 2
BARRIER = 2  # of the first group; the ones before serve the whole block, and all groups


def room_for(team: Team) -> int:
    """The bytes of shared memory that the groups stage their results in."""
    return team.working // GROUP * BOXES * BOX


def stores_of(kernel: Kernel, first: int) -> Iterator[tuple[Node, Map]]:
    """The stores at the function's top that copies can make, with their maps, numbered from `first`."""
    body, params = kernel.function.body, kernel.function.params
    touched = [n.args[0] for n in body.walk() if n.op.effects & {"read", "write"}]
    for node in body.nodes:
        if node.op is not tile.store or touched.count(node.args[0]) != 1:
            continue
        ref, value = node.args[:2]
        whole = len(node.args) == 2 + ref.type.rank and ref in params and fetched(ref.type)
        if whole and kernel.layout(value) == _fragments(kernel, node):
            yield node, Map(first, params.index(ref), (1,) * (ref.type.rank - 2) + (HEIGHT, INNER))
            first += 1


def _fragments(kernel: Kernel, node: Node) -> object:
    *outer, rows, columns = sizes(node.args[1])
    fits = set(outer) <= {1} and rows >= HEIGHT and columns % INNER == 0
    flat = group_fragments((rows, columns), kernel.team.threads) if fits else None
    return flat.reshaped(sizes(node.args[1])) if flat is not None else None


class Unload:
    """One such store under emission."""

    def __init__(self, kernel: Kernel, node: Node, map_: str) -> None:
        assert kernel.ring is not None
        self.kernel, self.text, self.node, self.map = kernel, kernel.text, node, map_
        self.value = node.args[1]
        self.layout = kernel.layout(self.value)
        self.outer = (0,) * (len(self.layout.shape) - 2)
        self.groups = kernel.team.threads // GROUP
        team = kernel.team
        self.group = team.once(("group",), "shr.u32", "b32", team.thread, 7)
        rest = team.once(("in group",), "and.b32", "b32", team.thread, GROUP - 1)
        self.leader = team.once(("leader",), "setp.eq.u32", "pred", rest, 0)
        slot = self.group
        if team.teams > 1:
            slot = team.once(("slot",), "mad.lo.u32", "b32", team.index, self.groups, self.group)
        self.barrier = team.once(("group barrier",), "add.u32", "b32", slot, BARRIER)
        own = team.once(("own room",), "mul.lo.u32", "b32", slot, BOXES * BOX)
        staged = kernel.ring.size * kernel.ring.stages
        base = team.once(("rooms",), "add.u32", "b32", kernel.ring.base, staged)
        self.room = team.once(("room",), "add.u32", "b32", base, own)

    def run(self) -> None:
        """Round by round: as many boxes as there is room for."""
        rows, columns = self.layout.shape[-2:]
        every = [(part, c) for part in range(0, rows, HEIGHT * self.groups) for c in range(0, columns, INNER)]
        for first in range(0, len(every), BOXES):
            boxes = every[first : first + BOXES]
            self.text.do("cp.async.bulk.wait_group.read", 0, guard=self.leader)
            self._meet()
            for number, (part, column) in enumerate(boxes):
                self._stage(part, column, number * BOX)
            self.text.do("fence.proxy.async.shared::cta")
            self._meet()
            for number, (part, column) in enumerate(boxes):
                self._copy(part, column, number * BOX)
            self.text.do("cp.async.bulk.commit_group", guard=self.leader)

    def _meet(self) -> None:
        self.text.do("bar.sync", self.barrier, GROUP)

    def _stage(self, part: int, column: int, offset: int) -> None:
        """A box into shared memory, 16 columns at a time."""
        held, dtype = self.kernel.values[self.value], self.value.type.dtype
        for chunk in range(INNER // 16):
            words = []
            for across in (0, 8):
                for down in (0, 8):
                    row, first = part + down, column + 16 * chunk + across
                    places = [(*self.outer, row, first + n) for n in (0, 1)]
                    pair = [held[self.layout.index[place]] for place in places]
                    words.append(half_words(self.text, dtype, *pair))
            at = f"[{self._lane(chunk)}+{offset}]"
            self.text.do("stmatrix.sync.aligned.m8n8.x4.shared.b16", at, f"{{{', '.join(words)}}}")

    def _lane(self, chunk: int) -> str:
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
        start = team.once(("box start",), "mad.lo.u32", "b32", row, ROW, self.room)
        return team.once(("box place", chunk), "mad.lo.u32", "b32", swapped, 16, start)

    def _copy(self, part: int, column: int, offset: int) -> None:
        """Begin the copy of a box; what lies outside the memory is left out."""
        text, team = self.text, self.kernel.team
        starts = [self.kernel.one(v) for v in self.node.args[2:]]
        places = [text.let("cvt.u32.u64", "b32", x) if x.startswith("%") else x for x in starts]
        own = team.once(("group rows",), "mul.lo.u32", "b32", self.group, HEIGHT)
        row = text.let("add.s32", "b32", own, places[-2])
        row = text.let("add.s32", "b32", row, part) if part else row
        last = text.let("add.s32", "b32", places[-1], column) if column else places[-1]
        inner_first = ", ".join([last, row, *reversed(places[:-2])])
        source = text.let("add.u32", "b32", self.room, offset) if offset else self.room
        form = f"cp.async.bulk.tensor.{len(places)}d.global.shared::cta.tile.bulk_group"
        text.do(form, f"[{self.map}, {{{inner_first}}}]", f"[{source}]", guard=self.leader)


def drained(kernel: Kernel) -> None:
    """Wait for the copies: shared memory lasts no longer than the block."""
    team = kernel.team
    rest = team.once(("in group",), "and.b32", "b32", team.thread, GROUP - 1)
    leader = team.once(("leader",), "setp.eq.u32", "pred", rest, 0)
    kernel.text.do("cp.async.bulk.wait_group", 0, guard=leader)
