"""Debug mode and the orders besides the group's barrier: stretches that meet, and the phases of mbarriers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tessera.errors import DeadlockError
from tessera.interp.checked import copies
from tessera.interp.checked.clocks import Clocks, Phases
from tessera.interp.checked.monitor import Monitor
from tessera.interp.checked.report import Finding
from tessera.interp.machine import Machine
from tessera.interp.mbarrier import active_tiles, places_of, state_of
from tessera.ir.core import Node
from tessera.numerics.bounded import certain
from tessera.op import Rules
from tessera.ops import group, mbarrier
from tessera.ops.mbarrier import BYTES, COUNT, MISSING, PHASE

rules = Rules("tile debug orders")


class Here(NamedTuple):
    """The tiles at an operation of mbarriers: what is known of these, which tiles, their barriers, and the state."""

    clocks: Clocks
    phases: Phases
    instance: np.ndarray
    slot: np.ndarray
    state: np.ndarray  # a row of fields for each tile, as it is now


def _here(monitor: Monitor, machine: Machine, args: list[Any]) -> Here:
    chunk = monitor.chunk
    assert chunk is not None and chunk.clocks is not None
    state = state_of(machine, args)
    places = places_of(machine, state, machine.arrays(args)[1])
    numbers = chunk.view(np.arange(chunk.who.size).reshape(chunk.count), machine)
    phases = chunk.clocks.of(monitor.region(args[0]), state.shape[-2])
    return Here(chunk.clocks, phases, numbers[active_tiles(machine)], places[-1], state[places])


@rules(group.meet)
def _(monitor, machine, node, args, go):
    width = node.attrs["width"]
    whole_stretches(monitor, machine, node, width, f"a meeting of {width} tiles")
    results = go()
    if machine.group > 1:
        monitor.chunk.passed(machine, width)
    return results


@rules(group.collect, group.exchange)
def _(monitor, machine, node, args, go):
    width = node.attrs["width"]
    whole_stretches(monitor, machine, node, width, f"an exchange among {width} tiles")
    return go()


def whole_stretches(monitor: Monitor, machine: Machine, node: Node, width: int, what: str) -> None:
    """Report the first stretch of which some tiles reach an operation of all of them, and which those are (rule M7)."""
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
    program = monitor.name(int(tiles[0])).partition(", tile")[0]
    message = f"{what} is reached by tiles {named} of {program}, {len(tiles)} of {width}"
    suggestion = "move it out of the `if` or loop whose condition differs between tiles"
    monitor.found(Finding("barrier", message, node.loc, suggestion=suggestion), last=True)


@rules(mbarrier.mbarrier_init)
def _(monitor, machine, node, args, go):
    here = _here(monitor, machine, args)
    here.clocks.init(here.phases, here.instance, here.slot, here.state[:, PHASE])
    return go()


@rules(mbarrier.mbarrier_arrive)
def _(monitor, machine, node, args, go):
    here = _here(monitor, machine, args)
    results = go()
    here.clocks.arrive(here.phases, here.instance, here.slot, _phases(here, node.attrs["count"]))
    monitor.chunk.told()
    return results


def _phases(here: Here, each: int) -> np.ndarray:
    """The phase that each arrival belongs to: where they end several phases, in the order of the tiles."""
    programs = here.instance // here.clocks.tiles * (here.slot.max(initial=0) + 1) + here.slot
    order = np.argsort(programs, kind="stable")
    first = np.r_[True, programs[order][1:] != programs[order][:-1]]
    turn = np.arange(order.size)
    rank = np.empty_like(turn)
    rank[order] = turn - np.maximum.accumulate(np.where(first, turn, 0))
    came = here.state[:, COUNT] - here.state[:, MISSING] + rank * each
    full = np.where(here.state[:, BYTES] == 0, came // np.maximum(here.state[:, COUNT], 1), 0)
    return here.state[:, PHASE] + full


@rules(mbarrier.mbarrier_copies)
def _(monitor, machine, node, args, go):
    here = _here(monitor, machine, args)
    column, clock = here.clocks.copied(here.phases, here.instance, here.slot, here.state[:, PHASE])
    copies.bind(monitor, machine, here.instance, column, clock)
    return go()


@rules(mbarrier.mbarrier_wait)
def _(monitor, machine, node, args, go):
    try:
        results = go()
    except DeadlockError as error:
        message = f"{error.message}: {error.received}"
        monitor.found(Finding("deadlock", message, node.loc, suggestion=error.suggestion), last=True)
        raise  # found in another branch already
    here = _here(monitor, machine, args)
    parity = np.broadcast_to(certain(machine.arrays(args)[2]), machine.count)[active_tiles(machine)]
    here.clocks.wait(here.phases, here.instance, here.slot, parity)
    return results
