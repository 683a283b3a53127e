"""Grid chunks in debug mode: the instances that run at once, their barrier epochs, and copies in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tessera.interp.sanitizer.shadow_memory import ShadowRegion
from tessera.interp.sanitizer.vector_clocks import VectorClocks
from tessera.interp.tile.machine import TileMachine

# Epochs of different programs are never equal: the upper half is the program's number.
EPOCHS_PER_PROGRAM = 1 << 32


@dataclass(frozen=True)
class BarrierCounts:
    """Barrier counts of tile partitions of one width: for each instance its partition and its count, without `turn`."""

    width: int
    counted: np.ndarray
    turn: int = 0

    @property
    def epochs(self) -> np.ndarray:
        """For each instance its partition and the number of barriers that the partition has passed."""
        return self.counted + self.turn

    def count_barrier(self, running: np.ndarray | None) -> BarrierCounts:
        """Count a barrier of the active instances (None: of all)."""
        if running is None:
            return BarrierCounts(self.width, self.counted, self.turn + 1)
        return BarrierCounts(self.width, self.counted + running, self.turn)


class GridChunk:
    """The instances of a part of a grid. A field is a number while all instances agree, and a table afterwards.

    `turn` counts the barriers that all have passed, on top of `epoch`; `committed` their groups of copies, on top of
    `commits`. `flights` are copies under way that are regular, `pending` all others, `bound` those that mbarriers
    count. With `clocks` an instance's epoch is its own clock. `inner` are the meetings of stretches within a group, of
    ascending `widths`; a wider one is a meeting of all within it too.
    """

    def __init__(self, machine: TileMachine, clocked: bool = False, widths: Sequence[int] = ()) -> None:
        self.first, self.count = machine.first, machine.count
        self.sizes = (*machine.grid, machine.group) if machine.group > 1 else machine.grid
        self.group = machine.group
        self.turn = self.committed = 0
        self.divergent_epochs: np.ndarray | None = None  # epochs, once instances differ
        self.apart: np.ndarray | None = None  # commit counts, once instances differ
        self.regular_copies: list[Any] = []
        self.pending: list[Any] = []
        self.bound: list[Any] = []
        self.regions: list[ShadowRegion] = []
        self.clocks = VectorClocks(self.who, machine.group) if clocked else None
        self.inner = tuple(BarrierCounts(w, self.who // w * EPOCHS_PER_PROGRAM) for w in widths)
        self.use_own_clocks()

    @cached_property
    def who(self) -> np.ndarray:
        """Each instance's number in the whole grid."""
        total = np.zeros((1,) * len(self.count), np.int64)
        for axis, (first, n) in enumerate(zip(self.first, self.count, strict=True)):
            along = (first + np.arange(n)) * math.prod(self.sizes[axis + 1 :])
            total = total + along.reshape((1,) * axis + (n,) + (1,) * (len(self.count) - axis - 1))
        return np.broadcast_to(total, self.count)

    @cached_property
    def base(self) -> np.ndarray:
        """Each instance's epoch at the start."""
        return self.who // self.group * EPOCHS_PER_PROGRAM

    @property
    def epoch(self) -> np.ndarray:
        """Each instance's epoch, without `turn`."""
        return self.base if self.divergent_epochs is None else self.divergent_epochs

    @property
    def commits(self) -> np.ndarray:
        """Each instance's groups of copies, without `committed`."""
        return np.zeros(self.count, np.int32) if self.apart is None else self.apart

    def use_own_clocks(self) -> None:
        """Use the instances' own clocks as their epochs, in a new table: recorded accesses keep theirs."""
        if self.clocks is not None:
            self.divergent_epochs = self.clocks.own.reshape(self.count).astype(np.int64) - self.turn

    def record_barrier(self, machine: TileMachine, width: int) -> None:
        """Record a barrier of the active partitions of `width` tiles (by default the group)."""
        whole = self.whole(machine)
        if self.clocks is not None:
            self.clocks.meet(self.running(machine).reshape(-1), width)
        if self.inner:
            here = None if whole else self.running(machine)
            self.inner = tuple(m if m.width > width else m.count_barrier(here) for m in self.inner)
        if whole and width == self.group:
            self.turn += 1
        elif self.clocks is not None:
            self.use_own_clocks()
        elif width == self.group:
            self.divergent_epochs = self.epoch.copy()
            self.view(self.divergent_epochs, machine)[...] += 1 if machine.active is None else machine.active

    def running(self, machine: TileMachine) -> np.ndarray:
        """The active instances of the chunk."""
        here = np.zeros(self.count, bool)
        self.view(here, machine)[...] = True if machine.active is None else machine.active
        return here

    def whole(self, machine: TileMachine) -> bool:
        """Whether all instances are active."""
        return machine.active is None and machine.count == self.count

    def view(self, table: np.ndarray, box: Any) -> np.ndarray:
        """The part of a table that belongs to the instances of a box (a machine's or an access's)."""
        places = zip(box.first, self.first, box.count, strict=True)
        return table[tuple(slice(f - o, f - o + n) for f, o, n in places)]
