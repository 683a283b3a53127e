"""Asynchronous copies in debug mode: which elements are under way, until the wait that covers them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.interp.debug_access import Access, lanes_of
from tessera.interp.debug_monitor import Chunk, Monitor
from tessera.interp.debug_shadow import READ, WRITE, Lanes, Region
from tessera.interp.machine import Machine
from tessera.ir.core import Node


@dataclass
class Pending:
    """The lanes of one side of a copy that are under way: whose they are (a place in the chunk), and in which group."""

    node: Node
    access: str
    region: Region
    lanes: Lanes
    instance: np.ndarray
    group: np.ndarray

    def part(self, chosen: np.ndarray) -> Pending:
        """The lanes where `chosen` holds."""
        lanes = self.lanes.part(chosen)
        return Pending(self.node, self.access, self.region, lanes, self.instance[chosen], self.group[chosen])


def begin(monitor: Monitor, machine: Machine, access: Access, kind: str, region: Region) -> None:
    """Note that a copy has begun to read or write these elements."""
    chunk = monitor.chunk
    assert chunk is not None
    lanes = lanes_of(monitor, machine, access, region)
    places = chunk.view(_places(chunk), machine)
    lead = np.array(np.unravel_index(lanes.place, access.shape)[: machine.rank])
    instance = places[tuple(lead)]
    group = chunk.commits.reshape(-1)[instance]
    region.hold()
    _count(region, kind, lanes.cells, 1)
    assert region.copy is not None
    region.copy[lanes.cells] = monitor.number(access.node)
    chunk.pending.append(Pending(access.node, kind, region, lanes, instance, group))


def commit(monitor: Monitor, machine: Machine) -> None:
    """Close the running instances' groups of copies."""
    chunk = monitor.chunk
    assert chunk is not None
    chunk.view(chunk.commits, machine)[...] += 1 if machine.active is None else machine.active


def wait(monitor: Monitor, machine: Machine, left: int) -> None:
    """Finish the running instances' copies but for their last `left` groups."""
    chunk = monitor.chunk
    assert chunk is not None
    running = np.zeros(chunk.who.shape, bool)
    chunk.view(running, machine)[...] = True if machine.active is None else machine.active
    limit = np.where(running, chunk.commits - left, 0).reshape(-1)
    rest = []
    for each in chunk.pending:
        done = each.group < limit[each.instance]
        _finish(monitor, chunk, each.part(done))
        if not done.all():
            rest.append(each.part(~done))
    chunk.pending = rest


def _finish(monitor: Monitor, chunk: Chunk, done: Pending) -> None:
    """A copy may do its work at any moment up to its wait: it counts as an access there too."""
    _count(done.region, done.access, done.lanes.cells, -1)
    epoch = chunk.epoch.reshape(-1)[done.instance]
    lanes = Lanes(done.lanes.cells, done.lanes.who, epoch, done.lanes.place)
    monitor.record(done.region, done.access, lanes, done.node)


def _count(region: Region, kind: str, cells: np.ndarray, by: int) -> None:
    table = {WRITE: region.arriving, READ: region.lent}[kind]
    assert table is not None
    np.add.at(table, cells, np.int16(by))


def _places(chunk: Chunk) -> np.ndarray:
    return np.arange(chunk.who.size).reshape(chunk.who.shape)
