"""Vector clocks: what each tile of a program knows of the others, and of the mbarriers between them.

A tile's own clock goes up whenever it releases something to others; an access is ordered before what a tile does now if
the tile knows the clock at which it was made (Mattern 1988; Flanagan and Freund, FastTrack, PLDI 2009). What a phase of
an mbarrier has been told is kept by phase, so that a wait learns of that phase alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from tessera.ir.core import Block
from tessera.ops.dialects import mbarrier, tile


@lru_cache(maxsize=1024)
def find_race_kind(body: Block, tiles: int) -> str | None:
    """The kind of race that clocks find in a kernel; None where barrier epochs are its only order."""
    if {n.op for n in body.walk()} & set(mbarrier.MBARRIER_OPS):
        return "unordered"
    return None if _are_nested(_exchange_widths(body, tiles), tiles) else "race"


@lru_cache(maxsize=1024)
def find_barrier_widths(body: Block, tiles: int) -> tuple[int, ...]:
    """The ascending widths of the partitions with barriers, where barrier epochs are the only order.

    Each lies within the next and the last in the group. So two tiles that some chain of meetings orders are ordered by
    a meeting of a stretch that has both: the first that leads out of the stretches with one of them alone.
    """
    return () if tiles == 1 or find_race_kind(body, tiles) else _exchange_widths(body, tiles)


def _exchange_widths(body: Block, tiles: int) -> tuple[int, ...]:
    met = {int(n.attrs["width"]) for n in body.walk() if n.op is tile.meet}
    return tuple(sorted(met - {1, tiles}))


def _are_nested(widths: tuple[int, ...], tiles: int) -> bool:
    return all(outer % inner == 0 for inner, outer in pairwise((*widths, tiles)))


@dataclass(eq=False)
class MbarrierPhases:
    """The mbarriers of one memory: of each program, barrier and phase what the arrivals told (a row of clocks).

    A barrier has two columns of clocks, from `column` on: how many of its phases are known to have ended, and the
    last phase whose copies are known to be done. `base` is the phase that counts as its first.
    """

    column: int
    base: np.ndarray
    begun: np.ndarray
    told: np.ndarray

    def reach(self, phase: int) -> None:
        """Grow the tables to hold a phase."""
        while phase >= self.told.shape[2]:
            self.told = np.concatenate([self.told, np.zeros_like(self.told)], axis=2)


class VectorClocks:
    """The clocks of a chunk: a row for each instance, a column for each tile, then two for each mbarrier."""

    def __init__(self, who: np.ndarray, tiles: int) -> None:
        self.tiles = tiles
        self.who = who.reshape(-1)  # ascending; the tiles of a program are contiguous
        self.known = np.zeros((self.who.size, tiles), np.int32)
        self.phases: dict[object, MbarrierPhases] = {}
        self.tick(np.arange(self.who.size))

    @property
    def own(self) -> np.ndarray:
        """Each instance's own clock."""
        every = np.arange(self.who.size)
        return self.known[every, every % self.tiles]

    def places(self, who: np.ndarray) -> np.ndarray:
        """The indices of instances in the chunk, from their grid numbers."""
        side_by_side = self.who[-1] - self.who[0] + 1 == self.who.size
        return who - self.who[0] if side_by_side else np.searchsorted(self.who, who)

    def tick(self, instance: np.ndarray) -> None:
        """Advance the clocks of these instances after a release."""
        self.known[instance, instance % self.tiles] += 1

    def meet(self, here: np.ndarray, width: int) -> None:
        """Join the clocks within each partition of `width` tiles that passes a barrier, where `here` holds."""
        stretches = self.known.reshape(-1, width, self.known.shape[1])
        some = here.reshape(-1, width).any(axis=1)
        stretches[some] = stretches[some].max(axis=1, keepdims=True)
        self.tick(np.flatnonzero(here))

    def of(self, memory: object, count: int) -> MbarrierPhases:
        """The phases of the mbarriers of a memory, `count` of them in each program."""
        if memory not in self.phases:
            programs, column = self.who.size // self.tiles, self.known.shape[1]
            self._widen(2 * count)
            shape = (programs, count)
            found = MbarrierPhases(column, np.zeros(shape, np.int64), np.zeros(shape, bool),
                           np.zeros((*shape, 2, self.known.shape[1]), np.int32))  # fmt: skip
            self.phases[memory] = found
        return self.phases[memory]

    def _widen(self, columns: int) -> None:
        more = np.zeros((len(self.known), columns), np.int32)
        self.known = np.concatenate([self.known, more], axis=1)
        for each in self.phases.values():
            room = np.zeros((*each.told.shape[:3], columns), np.int32)
            each.told = np.concatenate([each.told, room], axis=3)

    def init(self, phases: MbarrierPhases, instance: np.ndarray, slot: np.ndarray, ended: np.ndarray) -> None:
        """Reinitialise barriers with `ended` completed phases; parities count from an even phase."""
        first = np.unique(instance // self.tiles * phases.base.shape[1] + slot, return_index=True)[1]
        program, number, passed = instance[first] // self.tiles, slot[first], (ended + ended % 2)[first]
        phases.base[program, number] += np.where(phases.begun[program, number], passed, 0)
        phases.begun[program, number] = True

    def arrive(self, phases: MbarrierPhases, instance: np.ndarray, slot: np.ndarray, phase: np.ndarray) -> None:
        """Release: join the clocks of instances into an mbarrier phase."""
        program = instance // self.tiles
        phase = phase + phases.base[program, slot]
        phases.reach(int(phase.max(initial=0)))
        # Instances that arrive at one phase together: their clocks are joined in one reduction.
        count, reached = phases.told.shape[1:3]
        place = (program * count + slot) * reached + phase
        order = np.argsort(place, kind="stable")
        starts = np.flatnonzero(np.diff(place[order], prepend=-1))
        told = phases.told.reshape(-1, phases.told.shape[3])
        one = place[order[starts]]
        told[one] = np.maximum(told[one], np.maximum.reduceat(self.known[instance[order]], starts, axis=0))
        self.tick(instance)

    def copied(
        self, phases: MbarrierPhases, instance: np.ndarray, slot: np.ndarray, phase: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The column and clock at which the copies of these instances complete: when a phase ends."""
        program = instance // self.tiles
        phase, column = phase + phases.base[program, slot], phases.column + 2 * slot + 1
        phases.reach(int(phase.max(initial=0)))
        np.maximum.at(phases.told, (program, slot, phase, column), (phase + 1).astype(np.int32))
        return column, phase + 1

    def wait(self, phases: MbarrierPhases, instance: np.ndarray, slot: np.ndarray, parity: np.ndarray) -> None:
        """Acquire: instances that waited for a parity join the clock of the next completed phase of that parity.

        If no such phase is complete, the wait may have passed earlier, and no clock is joined.
        """
        program, column = instance // self.tiles, phases.column + 2 * slot
        base = phases.base[program, slot]
        ended = np.maximum(self.known[instance, column], base)
        due = (ended - base) & 1 == parity & 1
        phases.reach(int(ended.max(initial=0)))
        told = phases.told[program, slot, ended][due]
        self.known[instance[due]] = np.maximum(self.known[instance[due]], told)
        self.known[instance[due], column[due]] = ended[due] + 1
