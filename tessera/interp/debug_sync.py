"""Debug mode and the orders besides the group's barrier: stretches that meet, and mbarriers.

Both are taken to order all tiles of a program, not only those that they order: debug mode then reports no race that is
none, but misses some between tiles that were not ordered.
"""

from __future__ import annotations

import numpy as np

from tessera.errors import DeadlockError
from tessera.interp import debug_copies as copies
from tessera.interp.debug_monitor import Monitor
from tessera.interp.debug_report import Finding
from tessera.interp.machine import Machine
from tessera.op import Rules
from tessera.ops import group, mbarrier

rules = Rules("tile debug orders")


def _programs(monitor: Monitor, machine: Machine) -> np.ndarray:
    """The instances of the chunk whose program has a tile here."""
    chunk = monitor.chunk
    assert chunk is not None
    here = np.zeros(chunk.who.shape, bool)
    chunk.view(here, machine)[...] = True if machine.active is None else machine.active
    return here if machine.group == 1 else np.broadcast_to(here.any(axis=-1, keepdims=True), here.shape)


def _ordered(monitor: Monitor, machine: Machine) -> None:
    """A new epoch, the same for all tiles of each program here."""
    chunk, whole = monitor.chunk, _programs(monitor, machine)
    assert chunk is not None
    latest = chunk.epoch if machine.group == 1 else chunk.epoch.max(axis=-1, keepdims=True)
    chunk.moved = np.where(whole, latest + 1, chunk.epoch)  # anew: windows keep the one they were seen in


@rules(group.meet)
def _(monitor, machine, node, args, go):
    results = go()
    _ordered(monitor, machine)
    return results


@rules(mbarrier.mbarrier_copies)
def _(monitor, machine, node, args, go):
    copies.commit(monitor, machine)
    return go()


@rules(mbarrier.mbarrier_wait)
def _(monitor, machine, node, args, go):
    try:
        results = go()
    except DeadlockError as error:
        message = f"{error.message}: {error.received}"
        monitor.found(Finding("deadlock", message, node.loc, suggestion=error.suggestion), last=True)
        raise  # found in another branch already
    assert monitor.chunk is not None
    copies.finish(monitor, monitor.chunk, _programs(monitor, machine), 0)
    _ordered(monitor, machine)
    return results
