"""Happens-before edges in debug mode: group exchanges, mbarrier phases and the grid barrier."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import DeadlockError
from tessera.interp.sanitizer import async_copies
from tessera.interp.sanitizer.monitor import Monitor
from tessera.interp.sanitizer.report import Finding
from tessera.interp.sanitizer.vector_clocks import MbarrierPhases, VectorClocks
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.synchronisation import (
    describe_divergence,
    find_active_tiles,
    find_present_instances,
    locate_mbarriers,
    mbarrier_state,
)
from tessera.ir.core import Node
from tessera.ir.numerics.interval_arithmetic import require_exact
from tessera.ir.rules import Rules
from tessera.ops.dialects import mbarrier, tile
from tessera.ops.dialects.mbarrier import BYTES, COUNT, MISSING, PHASE

grid_barrier_rules = Rules("tile debug grid barrier")


@grid_barrier_rules(tile.grid_barrier)
def _(monitor, machine, node, args, go):
    here = find_present_instances(machine)
    if not here.all():
        error = describe_divergence(machine, here)
        monitor.report_finding(Finding("grid barrier", error.message, node.loc, suggestion=error.suggestion), last=True)
    monitor.chunk.record_barrier(machine, machine.group)
    _reset_shadow(monitor)
    return go()


def _reset_shadow(monitor: Monitor) -> None:
    """Clear the grid's shadow: accesses before the grid barrier happen before those after it."""
    for region in monitor.regions:
        monitor.settle(region)
        for domain in region.domains:
            if domain.timeless:
                domain.slots = {}


sync_rules = Rules("tile debug orders")


class MbarrierTiles(NamedTuple):
    """The tiles at an mbarrier operation: their clocks, their numbers, their barriers, and the barrier state."""

    clocks: VectorClocks
    phases: MbarrierPhases
    instance: np.ndarray
    slot: np.ndarray
    state: np.ndarray  # a row of current fields for each tile


def _find_mbarrier_tiles(monitor: Monitor, machine: TileMachine, args: list[Any]) -> MbarrierTiles:
    chunk = monitor.chunk
    assert chunk is not None and chunk.clocks is not None
    state = mbarrier_state(machine, args)
    places = locate_mbarriers(machine, state, machine.arrays(args)[1])
    numbers = chunk.view(np.arange(chunk.who.size).reshape(chunk.count), machine)
    phases = chunk.clocks.of(monitor.region(args[0]), state.shape[-2])
    return MbarrierTiles(chunk.clocks, phases, numbers[find_active_tiles(machine)], places[-1], state[places])


@sync_rules(tile.meet)
def _(monitor, machine, node, args, go):
    width = node.attrs["width"]
    check_convergence(monitor, machine, node, width, f"a meeting of {width} tiles")
    results = go()
    if machine.group > 1:
        monitor.chunk.record_barrier(machine, width)
    return results


@sync_rules(tile.collect, tile.exchange)
def _(monitor, machine, node, args, go):
    width = node.attrs["width"]
    check_convergence(monitor, machine, node, width, f"an exchange among {width} tiles")
    return go()


def check_convergence(monitor: Monitor, machine: TileMachine, node: Node, width: int, what: str) -> None:
    """Report the first partition of which only some tiles reach a collective operation (rule M7)."""
    chunk = monitor.chunk
    if not machine.divergent or chunk is None:
        return
    here = chunk.running(machine).reshape(-1, width)
    parted = here.any(axis=1) & ~here.all(axis=1)
    if not parted.any():
        return
    first = int(parted.argmax())
    tiles = chunk.who.reshape(-1, width)[first][here[first]]
    named = ", ".join(str(t % machine.group) for t in tiles[:8]) + (", …" if len(tiles) > 8 else "")
    who = int(tiles[0])
    program = monitor.name(who).partition(", tile")[0]
    message = f"{what} is reached by tiles {named} of {program}, {len(tiles)} of {width}"
    suggestion = "move it out of the `if` or loop whose condition differs between tiles"
    monitor.report_finding(Finding("barrier", message, node.loc, None, suggestion, monitor.instance(who)), last=True)


@sync_rules(mbarrier.mbarrier_init)
def _(monitor, machine, node, args, go):
    here = _find_mbarrier_tiles(monitor, machine, args)
    here.clocks.init(here.phases, here.instance, here.slot, here.state[:, PHASE])
    return go()


@sync_rules(mbarrier.mbarrier_arrive)
def _(monitor, machine, node, args, go):
    here = _find_mbarrier_tiles(monitor, machine, args)
    results = go()
    here.clocks.arrive(here.phases, here.instance, here.slot, _find_arrival_phases(here, node.attrs["count"]))
    monitor.chunk.use_own_clocks()
    return results


def _find_arrival_phases(here: MbarrierTiles, each: int) -> np.ndarray:
    """The phase of each arrival; arrivals that complete several phases count in tile order."""
    programs = here.instance // here.clocks.tiles * (here.slot.max(initial=0) + 1) + here.slot
    order = np.argsort(programs, kind="stable")
    first = np.r_[True, programs[order][1:] != programs[order][:-1]]
    turn = np.arange(order.size)
    rank = np.empty_like(turn)
    rank[order] = turn - np.maximum.accumulate(np.where(first, turn, 0))
    came = here.state[:, COUNT] - here.state[:, MISSING] + rank * each
    full = np.where(here.state[:, BYTES] == 0, came // np.maximum(here.state[:, COUNT], 1), 0)
    return here.state[:, PHASE] + full


@sync_rules(mbarrier.mbarrier_copies)
def _(monitor, machine, node, args, go):
    here = _find_mbarrier_tiles(monitor, machine, args)
    column, clock = here.clocks.copied(here.phases, here.instance, here.slot, here.state[:, PHASE])
    async_copies.bind_to_mbarrier(monitor, machine, here.instance, column, clock)
    return go()


@sync_rules(mbarrier.mbarrier_wait)
def _(monitor, machine, node, args, go):
    try:
        results = go()
    except DeadlockError as error:
        message = f"{error.message}: {error.received}"
        monitor.report_finding(Finding("deadlock", message, node.loc, suggestion=error.suggestion), last=True)
        raise  # reported in another branch already
    here = _find_mbarrier_tiles(monitor, machine, args)
    parity = np.broadcast_to(require_exact(machine.arrays(args)[2]), machine.count)[find_active_tiles(machine)]
    here.clocks.wait(here.phases, here.instance, here.slot, parity)
    return results
