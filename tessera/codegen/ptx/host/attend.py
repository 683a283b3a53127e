"""Extras of entries on the host: how much memory, what it holds before a launch, and what is done with it after."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.codegen.ptx.extras import KINDS
from tessera.codegen.ptx.host import parted, printed, reports

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Extra:
    """One kind of memory, in bytes: how many for an entry and its number of programs; what stands at its begin before a
    launch, where there are so many; how many are to be looked at, by what stands there; and what to do with them, when
    the program's grid and all kinds' memory are known."""

    room: Callable[[Entry, int], int]
    begin: Callable[[Entry, int], np.ndarray]
    used: Callable[[np.ndarray, int], int]
    finish: Callable[[Entry, Sequence[int], Mapping[str, np.ndarray]], None] | None


# In the order in which they are looked at: all that was printed, then the first thing that failed.
EXTRAS = {
    "prints": Extra(printed.room, printed.begin, printed.used, printed.show),
    "reports": Extra(reports.room, reports.begin, reports.used, reports.check),
    "values": Extra(reports.room_of_values, reports.no_values, reports.used_by_values, None),
    "meeting": Extra(parted.room, parted.begin, parted.used, parted.check),
}


class Extras:
    """The extras of one launch of an entry over a grid of programs."""

    def __init__(self, entry: Entry, grid: Sequence[int]) -> None:
        self._entry, self._grid = entry, tuple(grid)
        programs = math.prod(self._grid)
        self.rooms = {kind: EXTRAS[kind].room(entry, programs) for kind in KINDS if kind in entry}

    def begin(self, kind: str) -> np.ndarray:
        """What stands at the begin of a kind's memory before the launch."""
        return EXTRAS[kind].begin(self._entry, self.rooms[kind])

    def used(self, kind: str, begin: np.ndarray) -> int:
        """How many bytes are to be looked at after it, by what stands at the begin then."""
        return EXTRAS[kind].used(begin, self.rooms[kind])

    def memories(self) -> dict[str, np.ndarray]:
        """New memory for each kind, in the order of the parameters."""
        found = {}
        for kind, count in self.rooms.items():
            begin = self.begin(kind)
            found[kind] = np.zeros(count, np.uint8)
            found[kind][: len(begin)] = begin
        return found

    def finish(self, memories: Mapping[str, np.ndarray]) -> None:
        """Look at what a launch left.

        Raises:
            ExecutionError: an assertion failed.
            ResourceError: more was printed than there is room for.
            BarrierError: the programs of the grid did not meet.
        """
        for kind, extra in EXTRAS.items():
            if kind in memories and extra.finish is not None:
                extra.finish(self._entry, self._grid, memories)
