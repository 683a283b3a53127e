"""Sanitizer monitor: the shadow memory of a launch, the epochs of its groups, and where findings go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.core.device import array_address, array_span
from tessera.core.errors import UNKNOWN
from tessera.interp.observers import ObservedLaunch, Observer
from tessera.interp.sanitizer import async_copies
from tessera.interp.sanitizer.access import InstanceAccess, clip_access, find_lanes
from tessera.interp.sanitizer.grid_chunk import GridChunk
from tessera.interp.sanitizer.masked_loads import MaskTracker, find_wide_masks
from tessera.interp.sanitizer.memory_transactions import TransactionLint
from tessera.interp.sanitizer.report import Checks, Finding, SanitizerStopped
from tessera.interp.sanitizer.shadow_memory import (
    READ,
    AccessLanes,
    InitialisedBytes,
    RaceDomain,
    ShadowRegion,
)
from tessera.interp.sanitizer.vector_clocks import VectorClocks, find_barrier_widths, find_race_kind
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import InstanceMemory
from tessera.ir.core import Block, Function, Node


class Monitor:
    """Debug mode's state of a run: the shadow memory of each launch, the findings, and the other observers.

    Without `checks` nothing is checked: there are only observers.
    """

    def __init__(self, checks: Checks | None, inputs: Sequence[Any], observers: Sequence[Observer] = ()) -> None:
        self.checking = checks is not None
        self.checks = checks or Checks()
        self.observers = observers
        self.inputs = [array_span(a) for a in inputs if isinstance(a, np.ndarray) and a.size]
        self.lint = TransactionLint() if self.checks.lint else None
        self.masks = MaskTracker(self) if self.checks.lint else None
        self.nodes: list[Node] = []
        self.numbers: dict[Node, int] = {}
        self.written = InitialisedBytes()
        self.seen: set[tuple[Any, ...]] = set()
        self.regions: list[ShadowRegion] = []
        self.grid: tuple[int, ...] = (1,)
        self.group = 1
        self.place = UNKNOWN
        self.clocked: str | None = None  # the kind of races that clocks find, where more than meetings orders accesses
        self.widths: tuple[int, ...] = ()  # of the stretches within a group that meet
        self.chunk: GridChunk | None = None
        self.body = Block((), (), ())

    def enter(self, started: ObservedLaunch, written: set[int]) -> None:
        """Begin a launch: make a region for each range of memory that its arguments share."""
        self.grid, self.group, args = started.grid, started.group, started.args
        self.body, self.place = started.function.body, started.function.loc
        self.clocked, self.widths = find_race_kind(self.body, self.group), find_barrier_widths(self.body, self.group)
        for observer in self.observers:
            observer.enter(started)
        if not self.checking:
            return
        for finding in find_wide_masks(started.function, self.grid):
            self.report_finding(finding)
        spans = sorted((*array_span(a), i) for i, a in enumerate(args) if isinstance(a, np.ndarray) and a.size)
        clusters: list[tuple[int, int, list[int]]] = []
        for low, high, i in spans:
            if clusters and low < clusters[-1][1]:
                before = clusters.pop()
                clusters.append((before[0], max(before[1], high), [*before[2], i]))
            else:
                clusters.append((low, high, [i]))
        for low, high, _ in clusters:  # all of them before any view: overlapping ranges are merged
            if not self._belongs_to_argument(low, high):
                self.written.cover(low, high)
        found = [self._region(low, high, [args[i] for i in m], bool(written & set(m))) for low, high, m in clusters]
        self.regions = [r for r in found if r.domains or r.ready is not None]

    def width(self, function: Function, group: int) -> int:
        """The shadow words for each element: one for each tile's clock."""
        return max(1, group // 8) if self.checking and find_race_kind(function.body, group) else 1

    def _region(self, low: int, high: int, arrays: list[np.ndarray], written: bool) -> ShadowRegion:
        unit = min(a.itemsize for a in arrays)
        domains = [RaceDomain("program race", self.group, True)] if written else []
        if written and (self.group > 1 or self.clocked):
            domains += self._within_group(None)
        ready = None if self._belongs_to_argument(low, high) else self.written.view(low, high, unit)
        return ShadowRegion(low, high, unit, domains, ready, arrays)

    def _within_group(self, clocks: VectorClocks | None) -> list[RaceDomain]:
        """The race domains within a group: the partitions of each width, and the group."""
        parts = [1, *self.widths]
        levels = [*range(len(self.widths)), None]
        return [
            RaceDomain(self.clocked or "race", part, False, clocks, level)
            for part, level in zip(parts, levels, strict=True)
        ]

    def _belongs_to_argument(self, low: int, high: int) -> bool:
        """Whether a range of memory belongs to an argument: it is initialised."""
        return any(low < end and start < high for start, end in self.inputs)

    def leave(self) -> None:
        """End a launch."""
        self._report_unwaited_copies()
        for region in self.regions:
            if region.ready is not None:
                self.written.spread(region.low, region.high, region.unit)
        if self.lint is not None:
            self.lint.report(self)
        for observer in self.observers:
            observer.leave()

    def wrote(self, array: np.ndarray) -> None:
        """Record that the host has written an array."""
        if isinstance(array, np.ndarray) and array.size:
            self.written.mark(*array_span(array))

    def begin(self, machine: TileMachine) -> GridChunk:
        """Begin a chunk of the grid."""
        self._report_unwaited_copies()
        self.chunk = GridChunk(machine, bool(self.clocked), self.widths)
        if self.clocked:  # only tiles of one program are ordered: those of the last chunk have ended
            for domain in (d for r in self.regions for d in r.domains if not d.timeless):
                domain.clocks, domain.slots = self.chunk.clocks, {}
        return self.chunk

    def _report_unwaited_copies(self) -> None:
        """Report a copy of the ending chunk that no wait covers; for global memory the end of the launch is a wait."""
        for node, who in async_copies.find_unwaited(self, self.chunk) if self.chunk is not None else ():
            message = f"an asynchronous copy is never waited for: {self.name(who)} began it"
            suggestion = "wait before the kernel ends: tile.cp_wait_group(0)"
            self.report_finding(Finding("async", message, node.loc, None, suggestion, self.instance(who)))
        self.chunk = None

    def record_allocation(self, memory: InstanceMemory, shared: bool, swizzle: str = "") -> None:
        """Record newly allocated memory: it is uninitialised."""
        assert self.chunk is not None
        array = memory.array
        if not array.size:
            return
        low, high = array_span(array)
        watched = shared and (self.group > 1 or self.clocked)
        domains = self._within_group(self.chunk.clocks) if watched else []
        ready = np.zeros((high - low) // array.itemsize, bool)
        self.chunk.regions.append(ShadowRegion(low, high, array.itemsize, domains, ready, array, swizzle))

    def region(self, memory: InstanceMemory) -> ShadowRegion | None:
        """The region of a memory, if it is watched."""
        assert self.chunk is not None
        if not memory.array.size:
            return None
        place = array_address(memory.array)
        regions = self.chunk.regions if memory.lead else self.regions
        return next((r for r in regions if r.low <= place < r.high), None)

    def number(self, node: Node) -> int:
        """The number of a node, as shadow memory stores it."""
        if node not in self.numbers:
            self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[node]

    def who(self, machine: TileMachine, place: tuple[int, ...]) -> int:
        """The grid number of an active instance, from its index."""
        assert self.chunk is not None
        return int(self.chunk.view(self.chunk.who, machine)[place])

    def name(self, who: int) -> str:
        """Format an instance: its program and, in a group, its tile."""
        program = self.instance(who)[: len(self.grid)]
        return f"program {program}" + (f", tile {who % self.group}" if self.group > 1 else "")

    def instance(self, who: int) -> tuple[int, ...]:
        """The index of an instance: that of its program and, in a group, that of its tile."""
        program = tuple(int(i) for i in np.unravel_index(who // self.group, self.grid))
        return (*program, who % self.group) if self.group > 1 else program

    def report_finding(self, finding: Finding, last: bool = False) -> None:
        """Record a finding once for each pair of lines; `last` ends a collecting run."""
        key = (finding.kind, finding.location, finding.other)
        if key not in self.seen:
            self.seen.add(key)
            self.checks.report_finding(finding)
        if last:
            raise SanitizerStopped(finding.message, location=finding.location)

    def settle(self, region: ShadowRegion) -> None:
        """Move the accesses of a region's log to its shadow; later accesses go there too."""
        log, region.log = region.log or (), None
        for window in log:
            access = clip_access(InstanceAccess.of(window.node, window.place, window.mask, window.clip))
            if window.counted is None:
                lanes = find_lanes(window.chunk, window, access, region, window.epochs, inner=window.inner)
            else:
                column, clock = window.counted
                lanes = find_lanes(window.chunk, window, access, region, clock, columns=column)
            self.record(region, window.kind, lanes, window.node, gone=window.chunk is not self.chunk)
        if self.chunk is not None:
            async_copies.expand_regular_copies(self, self.chunk, region)

    def record(self, region: ShadowRegion, access: str, lanes: AccessLanes, node: Node, gone: bool = False) -> bool:
        """Record accesses in the shadow; return whether instances of different parties of a domain access one element.

        `gone`: their chunk has ended, and its clocks with it.
        """
        domains = (d for d in region.domains if not gone or d.clocks is None)
        met = [domain.of(access, region.size).record(lanes, self.number(node)) for domain in domains]
        if access != READ and region.ready is not None:
            region.ready[lanes.cells] = True
        return any(met)
