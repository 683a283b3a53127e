"""Named barriers: the sixteen barriers of each CTA (PTX ISA, bar and barrier), their waiting lanes and release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tessera.core.errors import BarrierError
from tessera.interp.target.ptx.machine.lane_set import LaneSet, make_lanes_from_indices
from tessera.interp.target.ptx.machine.memory import PtxFault

if TYPE_CHECKING:
    from tessera.interp.target.ptx.machine.simt import PtxMachine

BARRIER_COUNT = 16
# Delivers the result of a barrier reduction: (machine, lanes, votes, number of lanes).
Deliver = Callable[["PtxMachine", LaneSet, np.ndarray, np.ndarray], None]


@dataclass
class BarrierWaiters:
    """Waiting lanes: flat indices, and for each its barrier and the expected threads (0: all that have not exited)."""

    pc: int
    lanes: np.ndarray
    ids: np.ndarray
    expected: np.ndarray
    votes: np.ndarray | None = None
    deliver: Deliver | None = None

    def select(self, chosen: np.ndarray) -> BarrierWaiters:
        """Some of the lanes."""
        votes = None if self.votes is None else self.votes[chosen]
        return BarrierWaiters(self.pc, self.lanes[chosen], self.ids[chosen], self.expected[chosen], votes, self.deliver)


class NamedBarriers:
    """The barrier state of the machine's CTAs."""

    def __init__(self, machine: PtxMachine) -> None:
        self.machine = machine
        self.waiters: list[BarrierWaiters] = []
        self.arrived = np.zeros((machine.ctas, BARRIER_COUNT), np.int64)  # by bar.arrive, which does not wait

    def arrive(self, lanes: LaneSet, ids: np.ndarray, expected: np.ndarray) -> None:
        """Lanes arrive and do not wait."""
        np.add.at(self.arrived, (lanes.ctas, ids), 1)
        if self.machine.debug:
            for key in {(c, i) for c, i in zip(lanes.ctas.tolist(), ids.tolist(), strict=True)}:
                self.machine.shadow.arrive_at_barrier(lanes.flat[(lanes.ctas == key[0]) & (ids == key[1])], key)
        self._release(need_of=(lanes.ctas, ids, expected))

    def wait(self, parked: BarrierWaiters) -> None:
        """Lanes arrive and wait until the barrier completes."""
        self.waiters.append(parked)
        self._release()

    def is_complete_for(self, lanes: LaneSet) -> bool:
        """Whether these lanes alone complete a barrier of whole CTAs."""
        if not lanes.plain or not lanes.all_columns or self.waiters:
            return False
        return not self.arrived[lanes.rows].any()

    def remove_exited(self, lanes: LaneSet) -> None:
        """Barriers no longer expect lanes that have exited."""
        if not self.waiters:
            return
        if self.machine.debug:
            waits = np.concatenate([p.lanes[p.expected == 0] for p in self.waiters]) // self.machine.threads
            if (late := np.isin(lanes.ctas, waits)).any():
                lane = int(lanes.flat[np.argmax(late)])
                raise PtxFault("threads exit while others of their CTA wait at a barrier", BarrierError, lane)
        self._release()

    def _count_arrived(self) -> np.ndarray:
        full = self.arrived.copy()
        for p in self.waiters:
            np.add.at(full, (p.lanes // self.machine.threads, p.ids), 1)
        return full

    def _release(self, need_of: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None) -> None:
        """Release the lanes of completed barriers."""
        m = self.machine
        full, alive = self._count_arrived(), m.alive.sum(axis=1)
        complete = np.zeros((m.ctas, BARRIER_COUNT), bool)
        for p in self.waiters:
            cta = p.lanes // m.threads
            done = full[cta, p.ids] >= np.where(p.expected > 0, p.expected, alive[cta])
            complete[cta[done], p.ids[done]] = True
        if need_of is not None:
            cta, ids, expected = need_of
            done = full[cta, ids] >= expected
            complete[cta[done], ids[done]] = True
        if not complete.any():
            return
        released, kept = [], []
        for p in self.waiters:
            chosen = complete[p.lanes // m.threads, p.ids]
            released.append(p.select(chosen))
            if not chosen.all():
                kept.append(p.select(~chosen))
        self.waiters = kept
        self.arrived[complete] = 0
        self._resume_waiters([p for p in released if len(p.lanes)])

    def _resume_waiters(self, released: list[BarrierWaiters]) -> None:
        m = self.machine
        if m.debug:
            _check_warp_convergence(m, released)
            _notify_race_detector(m, released)
        total, votes = np.zeros((m.ctas, BARRIER_COUNT), np.int64), np.zeros((m.ctas, BARRIER_COUNT), np.int64)
        for p in released:
            np.add.at(total, (p.lanes // m.threads, p.ids), 1)
            if p.votes is not None:
                np.add.at(votes, (p.lanes // m.threads, p.ids), p.votes)
        for p in released:
            lanes = make_lanes_from_indices(p.lanes, m.extent)
            if p.deliver is not None:
                order = np.argsort(p.lanes)
                place = (p.lanes[order] // m.threads, p.ids[order])
                p.deliver(m, lanes, votes[place], total[place])
            m.push(p.pc + 1, lanes)


def _notify_race_detector(m: PtxMachine, released: list[BarrierWaiters]) -> None:
    """Report to the sanitizer which lanes a barrier synchronised."""
    flat, ids = np.concatenate([p.lanes for p in released]), np.concatenate([p.ids for p in released])
    cta = flat // m.threads
    for key in sorted({(c, i) for c, i in zip(cta.tolist(), ids.tolist(), strict=True)}):
        m.shadow.release_barrier(flat[(cta == key[0]) & (ids == key[1])], key)


def _check_warp_convergence(m: PtxMachine, released: list[BarrierWaiters]) -> None:
    """All threads of a warp must execute the same barrier instruction."""
    where = np.full(m.extent, -1)
    for p in released:
        where.reshape(-1)[p.lanes] = p.pc
    warps, alive = m.split_into_groups(where, 32), m.split_into_groups(m.alive, 32)
    first = np.where(alive, warps, 1 << 30).min(axis=2, keepdims=True)
    last = np.where(alive, warps, -1).max(axis=2, keepdims=True)
    diverged = alive & (last >= 0) & (first != last)
    if diverged.any():
        cta, warp, lane = (int(p[0]) for p in np.nonzero(diverged))
        m.pc = int(last[cta, warp, 0])
        raise PtxFault("only a part of a warp reaches this barrier", BarrierError, cta * m.threads + 32 * warp + lane)
