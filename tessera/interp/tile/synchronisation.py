"""Synchronisation in the Tile interpreter: mbarriers, the grid barrier, and exchanges between the tiles of a group."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.core.errors import BarrierError, DeadlockError, ExecutionError
from tessera.interp.tile import cooperative_scheduler
from tessera.interp.tile.machine import TileMachine
from tessera.ir.core import Node
from tessera.ir.numerics.interval_arithmetic import IntervalArray, require_exact
from tessera.ir.rules import Rules
from tessera.ops.dialects import mbarrier as ops
from tessera.ops.dialects import tile
from tessera.ops.dialects.mbarrier import BYTES, COUNT, MISSING, PHASE

grid_barrier_rules = Rules("tile grid barrier")


@grid_barrier_rules(tile.grid_barrier)
def _(machine, node, args, run):
    here = find_present_instances(machine)
    if not here.all():
        raise describe_divergence(machine, here)
    return ()


def find_present_instances(machine: TileMachine) -> np.ndarray:
    """The active instances of the whole launch."""
    tiles = (machine.group,) if machine.group > 1 else ()
    here = np.zeros((*machine.grid, *tiles), bool)
    box = tuple(slice(f, f + n) for f, n in zip(machine.first, machine.count, strict=True))
    here[box] = True if machine.active is None else machine.active
    return here


def describe_divergence(machine: TileMachine, here: np.ndarray) -> BarrierError:
    """Describe a divergent grid barrier: which instances reach it and which do not."""
    came, missing = (describe_instance(machine, tuple(int(i) for i in np.argwhere(w)[0])) for w in (here, ~here))
    return BarrierError(
        f"a grid barrier is reached by {came} and not by {missing}: by {int(here.sum())} of {here.size}",
        expected="all programs of the launch, with all their tiles, at the same barrier",
        suggestion="move it out of the `if` or loop whose condition differs between programs",
    )


def describe_instance(machine: TileMachine, place: tuple[int, ...]) -> str:
    """Format an instance of the launch."""
    rank = len(machine.grid)
    return f"program {place[:rank]}" + (f", tile {place[rank]}" if machine.group > 1 else "")


group_rules = Rules("tile groups")


@group_rules(tile.collect)
def _(machine, node, args, run):
    width, rank, x = node.attrs["width"], machine.rank, args[0]
    _check_convergence(machine, width)
    block = x.shape[rank:]
    lead = x.shape[:rank]
    if machine.group == 1 or lead[-1] == 1:  # uniform in the group
        return (x.reshape(*lead, 1, *block),)
    before, count = lead[:-1], lead[-1]
    if count == width:  # the result is uniform
        return (x.reshape(*before, 1, width, *block),)
    each = x.reshape(*before, count // width, 1, width, *block)
    seen = np.broadcast_to(each, (*before, count // width, width, width, *block))
    return (seen.reshape(*before, count, width, *block),)


@group_rules(tile.exchange)
def _(machine, node, args, run):
    width, rank, x = node.attrs["width"], machine.rank, args[0]
    _check_convergence(machine, width)
    if machine.group == 1 or x.shape[rank - 1] == 1:
        return (x,)
    me = np.arange(x.shape[rank - 1])
    lane = np.asarray(require_exact(args[1]))
    place = me - me % width + lane % width  # along the last instance axis
    index = place.reshape(place.shape + (1,) * (x.ndim - rank))
    return (_take_tiles(x, index, rank - 1),)


@group_rules(tile.meet)
def _(machine, node, args, run):
    # Instances run in lockstep, so earlier writes are visible; only a divergent partition is an error.
    _check_convergence(machine, node.attrs["width"], "meet")
    return ()


def _take_tiles(x: Any, index: np.ndarray, axis: int) -> Any:
    if isinstance(x, IntervalArray):
        return IntervalArray(np.take_along_axis(x.value, index, axis), np.take_along_axis(x.radius, index, axis))
    return np.take_along_axis(x, index, axis)


def _check_convergence(machine: TileMachine, width: int, what: str = "exchange values") -> None:
    """Check that each partition of tiles is fully active or fully inactive."""
    if machine.group % width:
        raise ExecutionError(f"partitions of {width} tiles do not divide a group of {machine.group}")
    if machine.group == 1:
        return
    here = machine.count[-1]
    whole = machine.first[-1] % width == 0 and here % width == 0
    mask = machine.active
    if whole and mask is not None and mask.shape[-1] > 1:
        stretches = mask.reshape(*mask.shape[:-1], math.ceil(here / width), width)
        whole = bool((stretches == stretches[..., :1]).all())
    if not whole:
        raise ExecutionError(
            f"some tiles {what} and others of the same partition do not",
            expected=f"all {width} tiles of a partition at the same operation",
            received=f"a condition that differs between the {machine.group} tiles",
            suggestion="move it out of the `if` or loop whose condition differs between tiles",
        )


mbarrier_rules = Rules("tile mbarriers")


def mbarrier_state(machine: TileMachine, args: list[Any]) -> np.ndarray:
    """The barriers' state array: axes for the instances (1 for the tiles of a group), the barrier, the field."""
    array = require_exact(args[0].array)
    assert isinstance(array, np.ndarray)
    return array


def find_active_tiles(machine: TileMachine) -> np.ndarray:
    """The active tiles."""
    mask = True if machine.active is None else machine.active
    return np.broadcast_to(mask, machine.count)


def locate_mbarriers(machine: TileMachine, state: np.ndarray, slot: Any) -> tuple[np.ndarray, ...]:
    """Find the index of each active tile's barrier in the state array."""
    active, number = find_active_tiles(machine), np.broadcast_to(require_exact(slot), machine.count)
    where = list(np.nonzero(active))
    chosen = number[tuple(where)]
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < state.shape[-2]):
        raise ExecutionError("there is no such mbarrier", expected=f"0 to {state.shape[-2] - 1}",
                             received=str(int(chosen[(chosen < 0) | (chosen >= state.shape[-2])][0])))  # fmt: skip
    own = [w if n > 1 else np.zeros_like(w) for w, n in zip(where, state.shape[:-2], strict=True)]
    return (*own, chosen)


def _sum_arrivals(machine: TileMachine, args: list[Any], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the state array and the sum of `count` over the active tiles of each barrier."""
    state = mbarrier_state(machine, args)
    total = np.zeros(state.shape[:-1], np.int64)
    np.add.at(total, locate_mbarriers(machine, state, args[1]), count)
    return state, total


@mbarrier_rules(ops.mbarrier_init)
def _(machine, node, args, run):
    state = mbarrier_state(machine, args)
    state[locate_mbarriers(machine, state, args[1])] = (node.attrs["count"], node.attrs["count"], 0, 0)
    return ()


@mbarrier_rules(ops.mbarrier_arrive)
def _(machine, node, args, run):
    state, came = _sum_arrivals(machine, args, node.attrs["count"])
    complete_phases(state, came)
    return ()


@mbarrier_rules(ops.mbarrier_expect)
def _(machine, node, args, run):
    state, more = _sum_arrivals(machine, args, node.attrs["count"])
    state[..., BYTES] += more
    return ()


@mbarrier_rules(ops.mbarrier_copies)
def _(machine, node, args, run):
    # Copies run immediately: their bytes have arrived.
    state, came = _sum_arrivals(machine, args, node.attrs["count"])
    state[..., BYTES] -= came
    complete_phases(state, np.zeros_like(came))
    return ()


def complete_phases(state: np.ndarray, came: np.ndarray) -> None:
    """Count arrivals, and complete each phase that has all of them and all bytes."""
    count = state[..., COUNT]
    done = count - state[..., MISSING] + came
    free = state[..., BYTES] == 0
    over = ~free & (done > count) & (came > 0)  # a barrier without arrivals may be uninitialised
    if over.any():
        raise ExecutionError(
            "more tiles arrive at an mbarrier than its phase expects, while its bytes are pending",
            expected=f"{int(count[over][0])} arrivals in each phase",
        )
    phases = np.where(free & (count > 0), done // np.maximum(count, 1), 0)
    state[..., PHASE] += phases
    state[..., MISSING] = count - (done - phases * count)


@mbarrier_rules(ops.mbarrier_wait)
def _(machine, node, args, run):
    state = mbarrier_state(machine, args)
    places = locate_mbarriers(machine, state, args[1])
    parity = np.broadcast_to(require_exact(args[2]), machine.count)[find_active_tiles(machine)]

    def waiting() -> np.ndarray:
        return state[..., PHASE][places] & 1 == parity & 1

    def stuck() -> ExecutionError:
        return _deadlock_error(machine, node, waiting(), state[places], places[-1])

    cooperative_scheduler.wait_until(machine, lambda: not waiting().any(), stuck, node.loc)
    return ()


def _deadlock_error(
    machine: TileMachine, node: Node, waiting: np.ndarray, states: np.ndarray, slots: np.ndarray
) -> ExecutionError:
    """The error for tiles that wait for a phase that no tile can complete."""
    who = np.argwhere(find_active_tiles(machine))[waiting][0]
    state, slot = states[waiting][0], int(slots[waiting][0])
    others = "".join(f"; others wait at {place}" for place in cooperative_scheduler.find_other_waits())
    return DeadlockError(
        "deadlock: an mbarrier's phase never ends", location=node.loc,
        expected="as many arrivals, and bytes, as the phase takes",
        received=f"{int(waiting.sum())} tiles wait, first {machine.name([int(i) for i in who])}: mbarrier {slot} is in "
        f"phase {state[PHASE]}, which lacks {_describe_missing(state)}{others}",
        suggestion="let each phase have its arrivals, and wait for parities 0, 1, 0, … in turn" + _loop_hint(),
    )  # fmt: skip


def _loop_hint() -> str:
    """An additional hint for a wait inside a branch."""
    if cooperative_scheduler.BRANCH_SCHEDULER.get() is None:
        return ""
    return "; in a loop tiles meet behind such a branch in every round: let the loop stand in the branch"


def _describe_missing(state: np.ndarray) -> str:
    """Describe the arrivals and bytes that a phase still needs."""
    arrivals = f"{state[MISSING]} of {state[COUNT]} arrivals"
    if state[BYTES] < 0:
        return f"{arrivals}, and to which {-state[BYTES]} bytes came that were not expected"
    return arrivals + f" and {state[BYTES]} bytes" * bool(state[BYTES])
