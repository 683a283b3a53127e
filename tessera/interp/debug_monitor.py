"""The monitor of debug mode: the shadow of all memory of a launch, and the epochs of its groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.interp.debug_report import Checks, Finding, Stopped
from tessera.interp.debug_shadow import READ, Domain, Lanes, Region, address, span
from tessera.interp.machine import Machine
from tessera.interp.memory import Memory
from tessera.ir.core import Node

# Epochs of different programs never meet: the program's number stands in the upper half.
EPOCHS = 1 << 32


@dataclass
class Chunk:
    """What runs at once: where it begins, each instance's number, each program's epoch, and copies under way."""

    first: tuple[int, ...]
    who: np.ndarray
    epoch: np.ndarray
    commits: np.ndarray
    pending: list[Any] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)

    @classmethod
    def of(cls, machine: Machine) -> Chunk:
        """The state of a machine's instances before they begin."""
        sizes = (*machine.grid, machine.group) if machine.group > 1 else machine.grid
        who = np.zeros((1,) * machine.rank, np.int64)
        for axis in range(machine.rank):
            stride = math.prod(sizes[axis + 1 :])
            who = who + machine.place(axis).array(machine.count) * stride
        who = np.broadcast_to(who, machine.count)
        epoch = who // machine.group * EPOCHS
        return cls(machine.first, who, epoch, np.zeros(machine.count, np.int32))

    def view(self, table: np.ndarray, machine: Machine) -> np.ndarray:
        """The part of a table that is the machine's present instances'."""
        places = zip(machine.first, self.first, machine.count, strict=True)
        return table[tuple(slice(f - o, f - o + n) for f, o, n in places)]


class Monitor:
    """Debug mode's view of a run: what each launch's memory holds, and where findings go."""

    def __init__(self, checks: Checks, inputs: Sequence[Any]) -> None:
        self.checks = checks
        self.inputs = [span(a) for a in inputs if isinstance(a, np.ndarray) and a.size]
        self.nodes: list[Node] = []
        self.numbers: dict[Node, int] = {}
        self.ready: dict[tuple[int, int], np.ndarray] = {}
        self.seen: set[tuple[Any, ...]] = set()
        self.regions: list[Region] = []
        self.grid: tuple[int, ...] = (1,)
        self.group = 1
        self.chunk: Chunk | None = None

    def enter(self, grid: tuple[int, ...], group: int, args: Sequence[Any], written: set[int]) -> None:
        """Begin a launch: a region for each stretch of memory that its arguments share."""
        self.grid, self.group = grid, group
        spans = sorted((*span(a), i) for i, a in enumerate(args) if isinstance(a, np.ndarray) and a.size)
        clusters: list[tuple[int, int, list[int]]] = []
        for low, high, i in spans:
            if clusters and low < clusters[-1][1]:
                before = clusters.pop()
                clusters.append((before[0], max(before[1], high), [*before[2], i]))
            else:
                clusters.append((low, high, [i]))
        found = [self._region(low, high, [args[i] for i in m], bool(written & set(m))) for low, high, m in clusters]
        self.regions = [r for r in found if r.domains or r.ready is not None]

    def _region(self, low: int, high: int, arrays: list[np.ndarray], written: bool) -> Region:
        unit = min(a.itemsize for a in arrays)
        domains = [Domain("program race", self.group, True)] if written else []
        if written and self.group > 1:
            domains.append(Domain("race", 1, False))
        given = any(low < end and start < high for start, end in self.inputs)
        ready = None if given else self.ready.setdefault((low, high), np.zeros((high - low) // unit, bool))
        return Region(low, high, unit, domains, ready, arrays)

    def begin(self, machine: Machine) -> Chunk:
        """Begin a chunk of the grid."""
        self.chunk = Chunk.of(machine)
        return self.chunk

    def made(self, memory: Memory, shared: bool) -> None:
        """Note fresh memory, which holds nothing yet."""
        assert self.chunk is not None
        array = memory.array
        if not array.size:
            return
        low, high = span(array)
        domains = [Domain("race", 1, False)] if shared and self.group > 1 else []
        ready = np.zeros((high - low) // array.itemsize, bool)
        self.chunk.regions.append(Region(low, high, array.itemsize, domains, ready, array))

    def region(self, memory: Memory) -> Region | None:
        """The region a memory lies in, if anything is to be watched there."""
        assert self.chunk is not None
        if not memory.array.size:
            return None
        place = address(memory.array)
        regions = self.chunk.regions if memory.lead else self.regions
        return next((r for r in regions if r.low <= place < r.high), None)

    def number(self, node: Node) -> int:
        """A node as a number that shadow memory can hold."""
        if node not in self.numbers:
            self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[node]

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
            raise Stopped(finding.message, location=finding.location)

    def conflicts(self, region: Region, opposed: str, lanes: Lanes) -> list[tuple[str, Any]]:
        """Each domain's first lane that meets an access of the `opposed` kind: (kind of race, slot and lane)."""
        found = []
        for domain in region.domains:
            if opposed not in domain.slots:
                continue
            slots = domain.of(opposed, region.size)
            for slot in (0, 1):
                bad = np.flatnonzero(slots.foreign(slot, lanes))
                if bad.size:
                    found.append((domain.kind, (slots, slot, bad)))
                    break
        return found

    def record(self, region: Region, access: str, lanes: Lanes, node: Node) -> None:
        """Note accesses in the shadow."""
        for domain in region.domains:
            domain.of(access, region.size).record(lanes, self.number(node))
        if access != READ and region.ready is not None:
            region.ready[lanes.cells] = True
