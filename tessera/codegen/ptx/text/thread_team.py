"""Thread teams: the threads that work on one tile, and the values that each derives from its thread number.

In a kernel without groups all threads of a block work on one tile; in a kernel with groups each thread is a tile.
"""

from __future__ import annotations

from collections.abc import Iterable

from tessera.codegen.ptx.layout import DistributedLayout
from tessera.codegen.ptx.text.builder import PtxBuilder

WARP_THREADS = 32
FIRST_TEAM_BARRIER = 8  # of the first of several teams


class ThreadTeam:
    """`threads` threads for each of `group` tiles (one of both numbers is 1), and names for what they all compute.

    A block may have several `teams`, each on a program of its own; `thread` is the number in the team.

    `helpers` more threads follow them, which hold no part of any block.
    """

    def __init__(self, text: PtxBuilder, threads: int, group: int, helpers: int = 0, teams: int = 1) -> None:
        assert 1 in (threads, group)
        self.text, self.threads, self.group, self.helpers, self.teams = text, threads, group, helpers, teams
        self.working = threads * group * teams
        self.block = self.working + helpers
        self._known: dict[tuple[object, ...], str] = {}
        with text.first():
            self.number = text.let("mov.u32", "b32", "%tid.x")  # in the block
            self.thread = self.number if teams == 1 else text.let("and.b32", "b32", self.number, threads - 1)

    @property
    def index(self) -> str:
        """Which of a block's teams this is."""
        return self.once(("team",), "shr.u32", "b32", self.number, (self.threads - 1).bit_length())

    def meet(self, text: PtxBuilder) -> None:
        """Every thread of the block waits for the others; helpers, which only fetch, are not waited for."""
        if self.teams > 1:
            text.do(
                "bar.sync", self.once(("team barrier",), "add.u32", "b32", self.index, FIRST_TEAM_BARRIER), self.threads
            )
        elif self.helpers:
            text.do("bar.sync", 1, self.threads)
        else:
            text.do("bar.sync", 0)

    def place(self, layout: DistributedLayout, axis: int) -> str:
        """Where a thread's first element lies along an axis: "0", or a 32-bit register that every path has."""
        bits = [(i, bit[1]) for i, bit in enumerate(layout.threads) if bit is not None and bit[0] == axis]
        if not bits:
            return "0"
        key = ("place", tuple(bits))
        if key not in self._known:
            with self.text.first():
                self._known[key] = self._gathered(bits)
        return self._known[key]

    def _gathered(self, bits: list[tuple[int, int]]) -> str:
        """Bits of the thread's number put where they belong: runs of them at a time."""
        total = ""
        for start, at, length in _bit_runs(bits):
            part = self.field(start, length)
            part = self.text.let("shl.b32", "b32", part, at) if at else part
            total = self.text.let("or.b32", "b32", total, part) if total else part
        return total

    def field(self, start: int, length: int) -> str:
        """Some bits of the thread's number as a number."""
        if start + length >= (self.threads - 1).bit_length():
            return self.text.let("shr.u32", "b32", self.thread, start) if start else self.thread
        shifted = self.text.let("shr.u32", "b32", self.thread, start) if start else self.thread
        return self.text.let("and.b32", "b32", shifted, (1 << length) - 1)

    def within(self, layout: DistributedLayout, axis: int, offset: int) -> str:
        """Whether the place `offset` further along an axis lies inside the block: "" (always), or a predicate."""
        size = layout.shape[axis]
        # Places apart only below what the size is a multiple of are inside together: neighbours share a predicate.
        offset -= offset % (size & -size)
        if layout.max_thread_offset(axis) + offset < size:
            return ""
        place = self.place(layout, axis)
        key = ("within", place, size - offset)
        if key not in self._known:
            with self.text.first():
                self._known[key] = self.text.let("setp.lt.s32", "pred", place, size - offset)
        return self._known[key]

    def inside(self, layout: DistributedLayout, offsets: Iterable[int]) -> list[str]:
        """The predicates, where any are needed, that a place is one of the block and no filling."""
        found = [self.within(layout, axis, offset) for axis, offset in enumerate(offsets)]
        return [each for each in found if each]

    def owner(self, layout: DistributedLayout) -> str:
        """Whether a thread is the first of those that hold the same: "" (all are), or a predicate."""
        spare = sum(1 << i for i in layout.replicated_bits)
        if not spare:
            return ""
        key = ("owner", spare)
        if key not in self._known:
            with self.text.first():
                rest = self.text.let("and.b32", "b32", self.thread, spare)
                self._known[key] = self.text.let("setp.eq.s32", "pred", rest, 0)
        return self._known[key]

    def truth(self, value: bool) -> str:
        """A predicate that always or never holds."""
        key = ("truth", value)
        if key not in self._known:
            with self.text.first():
                self._known[key] = self.text.let(f"setp.{'ge' if value else 'lt'}.u32", "pred", self.thread, 0)
        return self._known[key]

    def knows(self, key: tuple[object, ...]) -> bool:
        """Whether `once` has a result of this name."""
        return key in self._known

    def once(self, key: tuple[object, ...], instruction: str, kind: str, *operands: object) -> str:
        """The result of an instruction on what every path has, computed at the head."""
        if key not in self._known:
            with self.text.first():
                self._known[key] = self.text.let(instruction, kind, *operands)
        return self._known[key]


def _bit_runs(bits: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Neighbouring bits that stay neighbours: where from, where to, how many."""
    runs: list[tuple[int, int, int]] = []
    for source, target in sorted(bits):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs


def and_predicates(text: PtxBuilder, *predicates: str) -> str:
    """Whether all of these hold; "" stands for always."""
    total = ""
    for each in predicates:
        total = text.let("and.pred", "pred", total, each) if total and each else total or each
    return total
