"""The clock of a simulation: calls in order of their cycle."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import numpy as np


class Events:
    """A heap of (cycle, call). Calls of one cycle keep their order, or are shuffled by `seed` to expose races.

    >>> log, events = [], Events()
    >>> events.at(5, lambda: log.append("late")); events.at(2, lambda: log.append("early"))
    >>> events.run(); log, events.now
    (['early', 'late'], 5)
    """

    def __init__(self, seed: int | None = None) -> None:
        self.now = 0
        self._heap: list[tuple[int, float, int, Callable[[], object]]] = []
        self._count = 0
        self.random = None if seed is None else random.Random(seed)

    def at(self, time: int, call: Callable[[], object]) -> None:
        """Call at that cycle (now, if it has passed)."""
        self._count += 1
        order = self.random.random() if self.random else 0.0
        heapq.heappush(self._heap, (time if time > self.now else self.now, order, self._count, call))

    def run(self, until: Callable[[], bool] | None = None, limit: int | None = None) -> None:
        """Run until nothing is left, `until()` holds, or the clock would pass `limit`."""
        heap, pop = self._heap, heapq.heappop
        with np.errstate(all="ignore"):  # NaN and infinity are values to a PE
            while heap and not (until is not None and until()):
                if limit is not None and heap[0][0] > limit:
                    self.now = limit
                    return
                self.now, _, _, call = pop(heap)
                call()

    @property
    def pending(self) -> int:
        """How many calls are due."""
        return len(self._heap)
