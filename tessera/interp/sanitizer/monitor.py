"""Sanitizer monitor: the shadow memory of a launch, the epochs of its groups, and where findings go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.core.array_memory import array_address, array_span
from tessera.interp.observers import ObservedLaunch, Observer
from tessera.interp.sanitizer import async_copies
from tessera.interp.sanitizer.access import InstanceAccess, clip_access, find_lanes
from tessera.interp.sanitizer.grid_chunk import GridChunk
from tessera.interp.sanitizer.masked_loads import MaskTracker
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
    """Debug mode's view of a run: what each launch's memory holds, where findings go, and who else looks on.

    Without `checks` nothing is checked: there are observers alone.
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
        self.clocked: str | None = None  # the kind of races that clocks find, where more than meetings orders accesses
        self.widths: tuple[int, ...] = ()  # of the stretches within a group that meet
        self.chunk: GridChunk | None = None
        self.body = Block((), (), ())

    def enter(self, started: ObservedLaunch, written: set[int]) -> None:
        """Begin a launch: a region for each stretch of memory that its arguments share."""
        self.grid, self.group, args = started.grid, started.group, started.args
        self.body = started.function.body
        self.clocked, self.widths = find_race_kind(self.body, self.group), find_barrier_widths(self.body, self.group)
        for observer in self.observers:
            observer.enter(started)
        if not self.checking:
            return
        spans = sorted((*array_span(a), i) for i, a in enumerate(args) if isinstance(a, np.ndarray) and a.size)
        clusters: list[tuple[int, int, list[int]]] = []
        for low, high, i in spans:
            if clusters and low < clusters[-1][1]:
                before = clusters.pop()
                clusters.append((before[0], max(before[1], high), [*before[2], i]))
            else:
                clusters.append((low, high, [i]))
        for low, high, _ in clusters:  # all of them before any view is taken: areas may be made one
            if not self._given(low, high):
                self.written.cover(low, high)
        found = [self._region(low, high, [args[i] for i in m], bool(written & set(m))) for low, high, m in clusters]
        self.regions = [r for r in found if r.domains or r.ready is not None]

    def width(self, function: Function, group: int) -> int:
        """How many times as much room than its values a program has here: clocks of its tiles for each element."""
        return max(1, group // 8) if self.checking and find_race_kind(function.body, group) else 1

    def _region(self, low: int, high: int, arrays: list[np.ndarray], written: bool) -> ShadowRegion:
        unit = min(a.itemsize for a in arrays)
        domains = [RaceDomain("program race", self.group, True)] if written else []
        if written and (self.group > 1 or self.clocked):
            domains += self._within_group(None)
        ready = None if self._given(low, high) else self.written.view(low, high, unit)
        return ShadowRegion(low, high, unit, domains, ready, arrays)

    def _within_group(self, clocks: VectorClocks | None) -> list[RaceDomain]:
        """Between whom races in a group are looked for: parts of a stretch, of each width, and of the group."""
        parts = [1, *self.widths]
        levels = [*range(len(self.widths)), None]
        return [
            RaceDomain(self.clocked or "race", part, False, clocks, level)
            for part, level in zip(parts, levels, strict=True)
        ]

    def _given(self, low: int, high: int) -> bool:
        """Whether a stretch of memory came from outside: it holds what it holds."""
        return any(low < end and start < high for start, end in self.inputs)

    def leave(self) -> None:
        """End a launch."""
        self._unwaited()
        for region in self.regions:
            if region.ready is not None:
                self.written.spread(region.low, region.high, region.unit)
        if self.lint is not None:
            self.lint.report(self)
        for observer in self.observers:
            observer.leave()

    def wrote(self, array: np.ndarray) -> None:
        """Note that the host has written an array."""
        if isinstance(array, np.ndarray) and array.size:
            self.written.mark(*array_span(array))

    def begin(self, machine: TileMachine) -> GridChunk:
        """Begin a chunk of the grid."""
        self._unwaited()
        self.chunk = GridChunk(machine, bool(self.clocked), self.widths)
        if self.clocked:  # tiles of one program alone may be ordered: those of the last chunk are gone
            for domain in (d for r in self.regions for d in r.domains if not d.timeless):
                domain.clocks, domain.slots = self.chunk.clocks, {}
        return self.chunk

    def _unwaited(self) -> None:
        """Report a copy of the chunk that ends whose wait never came; to global memory the launch's end is one."""
        for node, who in async_copies.find_unwaited(self, self.chunk) if self.chunk is not None else ():
            message = f"an asynchronous copy is never waited for: {self.name(who)} began it"
            suggestion = "wait before the kernel ends: tile.cp_wait_group(0)"
            self.found(Finding("async", message, node.loc, suggestion=suggestion))
        self.chunk = None

    def made(self, memory: InstanceMemory, shared: bool, swizzle: str = "") -> None:
        """Note fresh memory, which holds nothing yet."""
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
        """The region a memory lies in, if anything is to be watched there."""
        assert self.chunk is not None
        if not memory.array.size:
            return None
        place = array_address(memory.array)
        regions = self.chunk.regions if memory.lead else self.regions
        return next((r for r in regions if r.low <= place < r.high), None)

    def number(self, node: Node) -> int:
        """A node as a number that shadow memory can hold."""
        if node not in self.numbers:
            self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[node]

    def who(self, machine: TileMachine, place: tuple[int, ...]) -> int:
        """The number of the instance at a place among those present."""
        assert self.chunk is not None
        return int(self.chunk.view(self.chunk.who, machine)[place])

    def name(self, who: int) -> str:
        """An instance in words: its program and, in a group, its tile."""
        program = tuple(int(i) for i in np.unravel_index(who // self.group, self.grid))
        return f"program {program}" + (f", tile {who % self.group}" if self.group > 1 else "")

    def found(self, finding: Finding, last: bool = False) -> None:
        """Record a finding once for each pair of lines; `last` ends a run that would collect more."""
        key = (finding.kind, finding.location, finding.other)
        if key not in self.seen:
            self.seen.add(key)
            self.checks.found(finding)
        if last:
            raise SanitizerStopped(finding.message, location=finding.location)

    def settle(self, region: ShadowRegion) -> None:
        """Put the accesses of a region's log into its shadow, where all later ones go too."""
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
        """Note accesses in the shadow; whether instances that a domain tells apart touch one element among them.

        `gone`: their chunk has ended, and its clocks with it.
        """
        domains = (d for d in region.domains if not gone or d.clocks is None)
        met = [domain.of(access, region.size).record(lanes, self.number(node)) for domain in domains]
        if access != READ and region.ready is not None:
            region.ready[lanes.cells] = True
        return any(met)
