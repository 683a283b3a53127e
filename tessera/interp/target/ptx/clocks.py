"""Vector clocks: what each thread knows to have happened, in threads and in the engines that copy for them.

A thread's clock counts its releases; another thread has seen them up to the entry in its own vector. Data that an
asynchronous copy moves belongs to an engine of its own (one a thread, or one an mbarrier), which nobody has seen before
the wait. (Lamport 1978; FastTrack, Flanagan and Freund 2009, keeps the last write and reads of each place as here.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tessera.interp.target.ptx.lanes import Lanes

if TYPE_CHECKING:
    from tessera.interp.target.ptx.machine import Machine

_BARRIERS = 256  # mbarriers of a cluster whose transfers are told apart
ENGINES = {"copy": 1, "matrix": 2, "bulk": 3}


class Clocks:
    """The vectors of all lanes: one row a lane, one column a thread or engine of its cluster."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.size = m.row_of.shape[1] * m.threads
        self.vectors = np.zeros((m.ctas * m.threads, 4 * self.size + _BARRIERS), np.int32)
        lane = np.arange(m.ctas * m.threads)
        self.own = m.rank[lane // m.threads] * m.threads + lane % m.threads  # the column of each lane
        self.vectors[lane, self.own] = 1
        self.committed = {kind: np.zeros(len(lane), np.int32) for kind in ENGINES}
        self.columns: dict[int, int] = {}

    def time(self, flat: np.ndarray) -> np.ndarray:
        """The clocks of lanes."""
        return self.vectors[flat, self.own[flat]]

    def engine(self, kind: str, flat: np.ndarray) -> np.ndarray:
        """The columns of the engines that work for lanes."""
        return ENGINES[kind] * self.size + self.own[flat]

    def barrier_column(self, offset: int) -> int:
        """The column of the transfers that an mbarrier counts."""
        place = self.columns.setdefault(offset, len(self.columns) % _BARRIERS)
        return 4 * self.size + place

    def seen(self, flat: np.ndarray, column: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Whether lanes have seen events; column -1 is none."""
        return (column < 0) | (self.vectors[flat, column] >= time)

    def publish(self, flat: np.ndarray) -> np.ndarray:
        """What lanes know together; they then begin a new stretch of time."""
        known = self.vectors[flat].max(axis=0)
        self.vectors[flat, self.own[flat]] += 1
        return known

    def learn(self, flat: np.ndarray, known: np.ndarray) -> None:
        """Lanes come to know what a vector says."""
        self.vectors[flat] = np.maximum(self.vectors[flat], known)

    def meet(self, flat: np.ndarray, known: np.ndarray | None = None) -> None:
        """Lanes that wait for each other know afterwards what any of them knew, and what came before."""
        together = self.publish(flat)
        self.learn(flat, together if known is None else np.maximum(together, known))

    def groups(self, lanes: Lanes, team: int) -> list[np.ndarray]:
        """Lanes divided by warp or warpgroup of their CTA."""
        key = lanes.ctas * (self.m.threads // team + 1) + lanes.flat % self.m.threads // team
        order = np.argsort(key, kind="stable")
        return np.split(lanes.flat[order], np.flatnonzero(np.diff(key[order])) + 1)

    def current(self, kind: str, flat: np.ndarray) -> np.ndarray:
        """The number of the group that lanes' engines are filling."""
        return self.committed[kind][flat] + 1

    def commit(self, kind: str, flat: np.ndarray) -> None:
        """Close the groups of lanes."""
        self.committed[kind][flat] += 1

    def wait(self, kind: str, flat: np.ndarray, left: int) -> None:
        """Lanes have seen all groups of their engines but the latest so many."""
        columns, done = self.engine(kind, flat), self.committed[kind][flat] - left
        self.vectors[flat, columns] = np.maximum(self.vectors[flat, columns], done)
