"""Named barriers: the sixteen barriers of each CTA (PTX ISA, bar and barrier), their waiting lanes and release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tessera.core.errors import BarrierError
from tessera.interp.target.ptx.machine.fault import PtxFault
from tessera.interp.target.ptx.machine.lane_set import LaneSet, lanes_from_indices

if TYPE_CHECKING:
    from tessera.interp.target.ptx.machine.simt import PtxMachine

BARRIER_COUNT = 16
# What a barrier with a reduction gives its lanes: (lanes, how many voted for, how many were there).
Deliver = Callable[["PtxMachine", LaneSet, np.ndarray, np.ndarray], None]


@dataclass
class BarrierWaiters:
    """Lanes at a barrier: flat numbers, the barrier of each and the threads it needs (0: all that live)."""

    pc: int
    lanes: np.ndarray
    ids: np.ndarray
    need: np.ndarray
    votes: np.ndarray | None = None
    deliver: Deliver | None = None

    def part(self, chosen: np.ndarray) -> BarrierWaiters:
        """Some of them."""
        votes = None if self.votes is None else self.votes[chosen]
        return BarrierWaiters(self.pc, self.lanes[chosen], self.ids[chosen], self.need[chosen], votes, self.deliver)


class NamedBarriers:
    """Barrier state of the CTAs of a machine."""

    def __init__(self, machine: PtxMachine) -> None:
        self.machine = machine
        self.waiters: list[BarrierWaiters] = []
        self.arrived = np.zeros((machine.ctas, BARRIER_COUNT), np.int64)  # by arrive alone: nobody waits there

    def arrive(self, lanes: LaneSet, ids: np.ndarray, need: np.ndarray) -> None:
        """Lanes that count at a barrier and go on."""
        np.add.at(self.arrived, (lanes.ctas, ids), 1)
        if self.machine.debug:
            for key in {(c, i) for c, i in zip(lanes.ctas.tolist(), ids.tolist(), strict=True)}:
                self.machine.shadow.barrier_arrived(lanes.flat[(lanes.ctas == key[0]) & (ids == key[1])], key)
        self._release(need_of=(lanes.ctas, ids, need))

    def wait(self, parked: BarrierWaiters) -> None:
        """Lanes that go on when enough of their CTA are there."""
        self.waiters.append(parked)
        self._release()

    def passes_immediately(self, lanes: LaneSet) -> bool:
        """Whether a barrier of whole CTAs lets these lanes pass at once: nobody is missing."""
        if not lanes.plain or not lanes.all_columns or self.waiters:
            return False
        return not self.arrived[lanes.rows].any()

    def remove_exited(self, lanes: LaneSet) -> None:
        """Lanes that have ended no longer count."""
        if not self.waiters:
            return
        if self.machine.debug:
            waits = np.concatenate([p.lanes[p.need == 0] for p in self.waiters]) // self.machine.threads
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
        """Let go the barriers that are complete."""
        m = self.machine
        full, alive = self._count_arrived(), m.alive.sum(axis=1)
        complete = np.zeros((m.ctas, BARRIER_COUNT), bool)
        for p in self.waiters:
            cta = p.lanes // m.threads
            done = full[cta, p.ids] >= np.where(p.need > 0, p.need, alive[cta])
            complete[cta[done], p.ids[done]] = True
        if need_of is not None:
            cta, ids, need = need_of
            done = full[cta, ids] >= need
            complete[cta[done], ids[done]] = True
        if not complete.any():
            return
        going, kept = [], []
        for p in self.waiters:
            chosen = complete[p.lanes // m.threads, p.ids]
            going.append(p.part(chosen))
            if not chosen.all():
                kept.append(p.part(~chosen))
        self.waiters = kept
        self.arrived[complete] = 0
        self._resume_waiters([p for p in going if len(p.lanes)])

    def _resume_waiters(self, going: list[BarrierWaiters]) -> None:
        m = self.machine
        if m.debug:
            _check_warp_convergence(m, going)
            _notify_race_detector(m, going)
        total, votes = np.zeros((m.ctas, BARRIER_COUNT), np.int64), np.zeros((m.ctas, BARRIER_COUNT), np.int64)
        for p in going:
            np.add.at(total, (p.lanes // m.threads, p.ids), 1)
            if p.votes is not None:
                np.add.at(votes, (p.lanes // m.threads, p.ids), p.votes)
        for p in going:
            lanes = lanes_from_indices(p.lanes, m.extent)
            if p.deliver is not None:
                order = np.argsort(p.lanes)
                place = (p.lanes[order] // m.threads, p.ids[order])
                p.deliver(m, lanes, votes[place], total[place])
            m.push(p.pc + 1, lanes)


def _notify_race_detector(m: PtxMachine, going: list[BarrierWaiters]) -> None:
    """Let the debug mode know who has met."""
    flat, ids = np.concatenate([p.lanes for p in going]), np.concatenate([p.ids for p in going])
    cta = flat // m.threads
    for key in sorted({(c, i) for c, i in zip(cta.tolist(), ids.tolist(), strict=True)}):
        m.shadow.barrier_released(flat[(cta == key[0]) & (ids == key[1])], key)


def _check_warp_convergence(m: PtxMachine, going: list[BarrierWaiters]) -> None:
    """All threads of a warp must have come to a barrier at one instruction."""
    where = np.full(m.extent, -1)
    for p in going:
        where.reshape(-1)[p.lanes] = p.pc
    warps, alive = m.padded(where, 32), m.padded(m.alive, 32)
    first = np.where(alive, warps, 1 << 30).min(axis=2, keepdims=True)
    last = np.where(alive, warps, -1).max(axis=2, keepdims=True)
    apart = alive & (last >= 0) & (first != last)
    if apart.any():
        cta, warp, lane = (int(p[0]) for p in np.nonzero(apart))
        m.pc = int(last[cta, warp, 0])
        raise PtxFault("a barrier that only a part of a warp reaches", BarrierError, cta * m.threads + 32 * warp + lane)
