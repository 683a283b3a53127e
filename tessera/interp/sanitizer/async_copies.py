"""Asynchronous copies in debug mode: which elements are in flight, until the wait that covers them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tessera.interp.sanitizer.access import InstanceAccess, clip_access, find_active_lanes, find_lanes
from tessera.interp.sanitizer.disjointness import AffineAccess, log_access, prove_access_safe, replace_logged_access
from tessera.interp.sanitizer.grid_chunk import GridChunk
from tessera.interp.sanitizer.shadow_memory import READ, WRITE, AccessLanes, ClockShadow, ShadowRegion
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import BlockAccess
from tessera.ir.core import Node

if TYPE_CHECKING:
    from tessera.interp.sanitizer.monitor import Monitor


@dataclass
class RegularCopy:
    """One side of a regular copy that all instances have issued: the elements it accesses and its commit group."""

    window: AffineAccess
    region: ShadowRegion
    group: int


@dataclass
class PendingCopy:
    """The lanes of one side of a copy in flight: the instance of each (its index in the chunk) and its commit group."""

    node: Node
    access: str
    region: ShadowRegion
    lanes: AccessLanes
    instance: np.ndarray
    group: np.ndarray

    def part(self, chosen: np.ndarray) -> PendingCopy:
        """The selected lanes."""
        lanes = self.lanes.part(chosen)
        return PendingCopy(self.node, self.access, self.region, lanes, self.instance[chosen], self.group[chosen])


@dataclass
class MbarrierCopy:
    """Copies that an mbarrier tracks: for each instance the commit group, column and clock of completion."""

    node: Node
    access: str
    region: ShadowRegion
    instance: np.ndarray
    group: np.ndarray
    column: np.ndarray
    clock: np.ndarray


def begin_regular_copy(
    monitor: Monitor, machine: TileMachine, node: Node, source: BlockAccess, target: BlockAccess, clip: bool
) -> bool:
    """Whether a copy is regular and proven safe as a whole; it is then recorded as in flight.

    False says nothing: it has to be looked at element by element.
    """
    chunk = monitor.chunk
    assert chunk is not None
    if monitor.lint is not None or chunk.apart is not None or not chunk.whole(machine):
        return False
    sides = ((source, READ, clip), (target, WRITE, False))
    judged = [prove_access_safe(monitor, machine, node, place, kind, None, edge) for place, kind, edge in sides]
    if None in judged:
        return False
    for each in judged:
        assert each is not None
        if each.region is not None and each.window is not None:
            log_access(each)
            chunk.regular_copies.append(RegularCopy(each.window, each.region, chunk.committed))
    return True


def expand_regular_copies(monitor: Monitor, chunk: GridChunk, region: ShadowRegion) -> None:
    """Track the copies in flight in a region element by element from now on."""
    flights = [f for f in chunk.regular_copies if f.region is region]
    chunk.regular_copies = [f for f in chunk.regular_copies if f.region is not region]
    for each in flights:
        window = each.window
        access = clip_access(InstanceAccess.of(window.node, window.place, None, window.clip))
        lanes = find_lanes(chunk, window, access, region, window.epochs, inner=window.inner)
        _track_copy(monitor, chunk, window, access, window.kind, region, lanes, each.group)


def begin_copy(monitor: Monitor, machine: TileMachine, access: InstanceAccess, kind: str, region: ShadowRegion) -> None:
    """Record that a copy in flight reads or writes these elements."""
    chunk = monitor.chunk
    assert chunk is not None
    _track_copy(
        monitor, chunk, machine, access, kind, region, find_active_lanes(monitor, machine, access, region), None
    )


def _track_copy(
    monitor: Monitor,
    chunk: GridChunk,
    box: TileMachine | AffineAccess,
    access: InstanceAccess,
    kind: str,
    region: ShadowRegion,
    lanes: AccessLanes,
    group: int | None,
) -> None:
    places = chunk.view(_instance_numbers(chunk), box)
    lead = np.array(np.unravel_index(lanes.place, access.shape)[: box.rank])
    instance = places[tuple(lead)]
    groups = chunk.commits.reshape(-1)[instance] + chunk.committed if group is None else np.full(instance.shape, group)
    region.hold()
    _count_in_flight(region, kind, lanes.cells, 1)
    assert region.copy is not None
    region.copy[lanes.cells] = monitor.number(access.node)
    chunk.pending.append(PendingCopy(access.node, kind, region, lanes, instance, groups))


def commit_group(monitor: Monitor, machine: TileMachine) -> None:
    """Commit the active instances' groups of copies."""
    chunk = monitor.chunk
    assert chunk is not None
    if chunk.whole(machine):
        chunk.committed += 1
        return
    _expand_all_regular_copies(monitor, chunk)
    chunk.apart = chunk.commits.copy()
    chunk.view(chunk.apart, machine)[...] += 1 if machine.active is None else machine.active


def bind_to_mbarrier(
    monitor: Monitor, machine: TileMachine, instance: np.ndarray, column: np.ndarray, clock: np.ndarray
) -> None:
    """Commit the active instances' groups of copies: they complete when a clock column reaches a clock."""
    chunk = monitor.chunk
    assert chunk is not None
    if chunk.whole(machine):
        _bind_regular_copies(chunk, column, clock)
    else:
        _expand_all_regular_copies(monitor, chunk)
    number = np.full(chunk.who.size, -1)
    number[instance] = np.arange(instance.size)
    current = chunk.commits.reshape(-1) + chunk.committed
    rest = []
    for each in chunk.pending:
        mine = (number[each.instance] >= 0) & (each.group == current[each.instance])
        if mine.any():
            part = each.part(mine)
            _bind_pending_copy(monitor, chunk, part, column[number[part.instance]], clock[number[part.instance]])
        if not mine.all():
            rest.append(each.part(~mine))
    chunk.pending = rest
    commit_group(monitor, machine)


def _bind_regular_copies(chunk: GridChunk, column: np.ndarray, clock: np.ndarray) -> None:
    counted = column.reshape(chunk.count), clock.reshape(chunk.count)
    everyone = np.arange(chunk.who.size)
    group = chunk.commits.reshape(-1) + chunk.committed
    for each in [f for f in chunk.regular_copies if f.group == chunk.committed]:
        chunk.regular_copies.remove(each)
        chunk.bound.append(
            MbarrierCopy(each.window.node, each.window.kind, each.region, everyone, group, column, clock)
        )
        if each.region.log is not None:
            each.region.log[:] = [w for w in each.region.log if w is not each.window]
            replace_logged_access(each.region, replace(each.window, counted=counted))


def _bind_pending_copy(
    monitor: Monitor, chunk: GridChunk, part: PendingCopy, column: np.ndarray, clock: np.ndarray
) -> None:
    """From now on these accesses belong to the mbarrier's copies, and no longer to the tile that issued them."""
    _count_in_flight(part.region, part.access, part.lanes.cells, -1)
    lanes = AccessLanes(part.lanes.cells, part.lanes.who, clock, part.lanes.place, column)
    for domain in part.region.domains:
        slots = domain.of(part.access, part.region.size)
        if isinstance(slots, ClockShadow):
            slots.withdraw(part.lanes)
            slots.record(lanes, monitor.number(part.node))
    one = np.unique(part.instance, return_index=True)[1]
    told = part.instance[one], part.group[one], column[one], clock[one]
    chunk.bound.append(MbarrierCopy(part.node, part.access, part.region, *told))


def wait_group(monitor: Monitor, machine: TileMachine, left: int) -> None:
    """Complete the active instances' copies except their last `left` groups."""
    chunk = monitor.chunk
    assert chunk is not None
    running = chunk.running(machine)
    if not running.all():
        _expand_all_regular_copies(monitor, chunk)
    done = [f for f in chunk.regular_copies if f.group < chunk.committed - left]
    chunk.regular_copies = [f for f in chunk.regular_copies if f.group >= chunk.committed - left]
    for each in done:  # the copy may have run at any moment before this wait
        if each.region.log is not None:
            each.region.log.append(
                replace(each.window, turn=chunk.turn, epoch=chunk.divergent_epochs, inner=chunk.inner)
            )
    if chunk.pending or chunk.bound:
        limit = np.where(running, chunk.commits + chunk.committed - left, 0).reshape(-1)
        _finish_pending(monitor, chunk, limit)
        _finish_mbarrier_copies(chunk, limit)


def _finish_mbarrier_copies(chunk: GridChunk, limit: np.ndarray) -> None:
    """A wait for commit groups also completes the copies in them that an mbarrier tracks."""
    for each in chunk.bound:
        assert chunk.clocks is not None
        who = each.instance[(done := each.group < limit[each.instance])]
        known = chunk.clocks.known
        known[who, each.column[done]] = np.maximum(known[who, each.column[done]], each.clock[done])


def _finish_pending(monitor: Monitor, chunk: GridChunk, limit: np.ndarray) -> None:
    rest = []
    for each in chunk.pending:
        done = each.group < limit[each.instance]
        _finish_copy(monitor, chunk, each.part(done))
        if not done.all():
            rest.append(each.part(~done))
    chunk.pending = rest


def _finish_copy(monitor: Monitor, chunk: GridChunk, done: PendingCopy) -> None:
    """Record the copy as an access at its wait too: it may run at any moment up to there."""
    _count_in_flight(done.region, done.access, done.lanes.cells, -1)
    epoch = chunk.epoch.reshape(-1)[done.instance] + chunk.turn
    inner = tuple(m.epochs.reshape(-1)[done.instance] for m in chunk.inner)
    lanes = AccessLanes(done.lanes.cells, done.lanes.who, epoch, done.lanes.place, inner=inner)
    monitor.record(done.region, done.access, lanes, done.node)


def _expand_all_regular_copies(monitor: Monitor, chunk: GridChunk) -> None:
    for each in list(chunk.regular_copies):
        monitor.settle(each.region)


def _count_in_flight(region: ShadowRegion, kind: str, cells: np.ndarray, by: int) -> None:
    table = {WRITE: region.copy_writes, READ: region.copy_reads}[kind]
    assert table is not None
    np.add.at(table, cells, np.int16(by))


def _instance_numbers(chunk: GridChunk) -> np.ndarray:
    return np.arange(chunk.who.size).reshape(chunk.count)


def find_unwaited(monitor: Monitor, chunk: GridChunk) -> list[tuple[Node, int]]:
    """Copies to shared memory that no wait covers, each with the number of an instance that issued it."""
    flying = [
        (f.window.node, int(chunk.who.flat[0]))
        for f in chunk.regular_copies
        if f.window.kind == WRITE and f.region in chunk.regions
    ]
    pending = [
        (p.node, int(p.lanes.who[0]))
        for p in chunk.pending
        if p.access == WRITE and p.region in chunk.regions and p.lanes.who.size
    ]
    return flying + pending + _find_unwaited_mbarrier_copies(chunk)


def _find_unwaited_mbarrier_copies(chunk: GridChunk) -> list[tuple[Node, int]]:
    """Copies for whose mbarrier no tile of their program has waited."""
    found = []
    for each in chunk.bound:
        assert chunk.clocks is not None
        programs = chunk.clocks.known.reshape(-1, chunk.group, chunk.clocks.known.shape[1]).max(axis=1)
        never = each.instance[programs[each.instance // chunk.group, each.column] < each.clock]
        if never.size and each.access == WRITE and each.region in chunk.regions:
            found.append((each.node, int(chunk.who.flat[never[0]])))
    return found
