"""Thread teams: the threads that work on one tile, and values that each derives from its thread number.

In a kernel without groups all threads of a block work on one tile; in a kernel with groups each thread is a tile.
"""

from __future__ import annotations

from collections.abc import Iterable

from tessera.codegen.ptx.layout import DistributedLayout
from tessera.codegen.ptx.text.builder import PtxBuilder

WARP_THREADS = 32
WARPGROUP_THREADS = 128
CONSUMER_BARRIER = 1  # the named barrier of all consumers, which the producer does not take part in
FIRST_TEAM_BARRIER = 8  # the named barrier of the first of several teams


class ThreadTeam:
    """`threads` threads for each of `group` tiles (one of both numbers is 1), and their common subexpressions.

    A thread block may have several `teams`, each with a program of its own; `thread` is the number in the team.

    `producer_threads` more threads follow them; they hold no part of any block.
    """

    def __init__(self, text: PtxBuilder, threads: int, group: int, producer_threads: int = 0, teams: int = 1) -> None:
        assert 1 in (threads, group)
        self.text, self.threads, self.group, self.teams = text, threads, group, teams
        self.producer_threads = producer_threads
        self.worker_threads = threads * group * teams
        self.block_threads = self.worker_threads + producer_threads
        self._hoisted: dict[tuple[object, ...], str] = {}
        with text.at_entry_head():
            self.block_thread = text.let("mov.u32", "b32", "%tid.x")
            self.thread = (
                self.block_thread if teams == 1 else text.let("and.b32", "b32", self.block_thread, threads - 1)
            )

    @property
    def team_index(self) -> str:
        """The number of this team in its block."""
        return self.hoist(("team",), "shr.u32", "b32", self.block_thread, (self.threads - 1).bit_length())

    def synchronise(self) -> None:
        """Emit a barrier of the team's threads: a named barrier where the block has other threads too."""
        if self.teams > 1:
            barrier = self.hoist(("team barrier",), "add.u32", "b32", self.team_index, FIRST_TEAM_BARRIER)
            self.text.do("bar.sync", barrier, self.threads)
        elif self.producer_threads:
            self.text.do("bar.sync", CONSUMER_BARRIER, self.threads)
        else:
            self.text.do("bar.sync", 0)

    def hoist(self, key: tuple[object, ...], instruction: str, kind: str, *operands: object) -> str:
        """The result of an instruction on loop-invariant operands, emitted once at the head of the entry."""
        if key not in self._hoisted:
            with self.text.at_entry_head():
                self._hoisted[key] = self.text.let(instruction, kind, *operands)
        return self._hoisted[key]

    def has_hoisted(self, key: tuple[object, ...]) -> bool:
        """Whether `hoist` has emitted the instruction of this key."""
        return key in self._hoisted

    def thread_offset(self, layout: DistributedLayout, axis: int) -> str:
        """The index of a thread's first element along an axis: "0", or a 32-bit register."""
        bits = [(i, bit[1]) for i, bit in enumerate(layout.threads) if bit is not None and bit[0] == axis]
        if not bits:
            return "0"
        key = ("thread offset", tuple(bits))
        if key not in self._hoisted:
            with self.text.at_entry_head():
                self._hoisted[key] = self._gather_bits(bits)
        return self._hoisted[key]

    def _gather_bits(self, bits: list[tuple[int, int]]) -> str:
        """Move bits of the thread number to their positions, adjacent bits together."""
        total = ""
        for source, target, length in _find_bit_runs(bits):
            part = self._extract_bits(source, length)
            part = self.text.let("shl.b32", "b32", part, target) if target else part
            total = self.text.let("or.b32", "b32", total, part) if total else part
        return total

    def _extract_bits(self, start: int, length: int) -> str:
        """A bit field of the thread number."""
        shifted = self.text.let("shr.u32", "b32", self.thread, start) if start else self.thread
        if start + length >= (self.threads - 1).bit_length():
            return shifted
        return self.text.let("and.b32", "b32", shifted, (1 << length) - 1)

    def axis_predicate(self, layout: DistributedLayout, axis: int, offset: int) -> str:
        """The predicate that `offset` past a thread's first element is inside the block's axis; "" if it always is."""
        size = layout.shape[axis]
        # Offsets that differ only below the size's largest power-of-two factor share a predicate.
        offset -= offset % (size & -size)
        if layout.max_thread_offset(axis) + offset < size:
            return ""
        thread = self.thread_offset(layout, axis)
        return self.hoist(("within", thread, size - offset), "setp.lt.s32", "pred", thread, size - offset)

    def bounds_predicates(self, layout: DistributedLayout, offsets: Iterable[int]) -> list[str]:
        """The predicates, where any are needed, that an element is inside the block rather than padding."""
        found = [self.axis_predicate(layout, axis, offset) for axis, offset in enumerate(offsets)]
        return [each for each in found if each]

    def owner_predicate(self, layout: DistributedLayout) -> str:
        """The predicate of the first thread among those that hold the same elements; "" where none are replicated."""
        replicated = sum(1 << i for i in layout.replicated_bits)
        if not replicated:
            return ""
        bits = self.hoist(("replica", replicated), "and.b32", "b32", self.thread, replicated)
        return self.hoist(("owner", replicated), "setp.eq.s32", "pred", bits, 0)

    def first_thread_predicate(self) -> str:
        """The predicate of the first thread of the team; in a kernel with groups, of the block."""
        return self.hoist(("first",), "setp.eq.u32", "pred", self.thread, 0)

    def tile_leader_predicate(self) -> str:
        """The predicate of the one thread that acts for a tile; "" where each thread is a tile."""
        return self.first_thread_predicate() if self.threads > 1 else ""

    def constant_predicate(self, value: bool) -> str:
        """A predicate that is always true, or always false."""
        return self.hoist(("constant", value), f"setp.{'ge' if value else 'lt'}.u32", "pred", self.thread, 0)


def _find_bit_runs(bits: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Runs of bits that are adjacent in source and target: source, target, length."""
    runs: list[tuple[int, int, int]] = []
    for source, target in sorted(bits):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs


def and_predicates(text: PtxBuilder, *predicates: str) -> str:
    """The conjunction of predicates; "" is always true."""
    total = ""
    for each in predicates:
        total = text.let("and.pred", "pred", total, each) if total and each else total or each
    return total
