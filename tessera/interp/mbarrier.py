"""Barriers in memory for all program instances at once; a wait lets other branches of a group run first."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.errors import DeadlockError, ExecutionError
from tessera.interp import interleave
from tessera.interp.machine import Machine
from tessera.ir.core import Node
from tessera.numerics.bounded import certain
from tessera.op import Rules
from tessera.ops import mbarrier as ops
from tessera.ops.mbarrier import BYTES, COUNT, MISSING, PHASE

rules = Rules("tile mbarriers")


def state_of(machine: Machine, args: list[Any]) -> np.ndarray:
    """The barriers' numbers: axes for the instances (1 for the tiles of a group), the barrier, the field."""
    array = certain(args[0].array)
    assert isinstance(array, np.ndarray)
    return array


def active_tiles(machine: Machine) -> np.ndarray:
    """Which of the present instances run."""
    mask = True if machine.active is None else machine.active
    return np.broadcast_to(mask, machine.count)


def places_of(machine: Machine, state: np.ndarray, slot: Any) -> tuple[np.ndarray, ...]:
    """For each active tile the index of its barrier in the state."""
    active, number = active_tiles(machine), np.broadcast_to(certain(slot), machine.count)
    where = list(np.nonzero(active))
    chosen = number[tuple(where)]
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < state.shape[-2]):
        raise ExecutionError("there is no such mbarrier", expected=f"0 to {state.shape[-2] - 1}",
                             received=str(int(chosen[(chosen < 0) | (chosen >= state.shape[-2])][0])))  # fmt: skip
    own = [w if n > 1 else np.zeros_like(w) for w, n in zip(where, state.shape[:-2], strict=True)]
    return (*own, chosen)


def _added(machine: Machine, args: list[Any], count: int) -> tuple[np.ndarray, np.ndarray]:
    """The state, and `count` for each active tile added up for each barrier."""
    state = state_of(machine, args)
    total = np.zeros(state.shape[:-1], np.int64)
    np.add.at(total, places_of(machine, state, args[1]), count)
    return state, total


@rules(ops.mbarrier_init)
def _(machine, node, args, run):
    state = state_of(machine, args)
    state[places_of(machine, state, args[1])] = (node.attrs["count"], node.attrs["count"], 0, 0)
    return ()


@rules(ops.mbarrier_arrive)
def _(machine, node, args, run):
    state, came = _added(machine, args, node.attrs["count"])
    settle(state, came)
    return ()


@rules(ops.mbarrier_expect)
def _(machine, node, args, run):
    state, more = _added(machine, args, node.attrs["count"])
    state[..., BYTES] += more
    return ()


@rules(ops.mbarrier_copies)
def _(machine, node, args, run):
    # Copies are done at once: their bytes have come.
    state, came = _added(machine, args, node.attrs["count"])
    state[..., BYTES] -= came
    settle(state, np.zeros_like(came))
    return ()


def settle(state: np.ndarray, came: np.ndarray) -> None:
    """Count arrivals, and end each phase that nothing is missing in."""
    count = state[..., COUNT]
    done = count - state[..., MISSING] + came
    free = state[..., BYTES] == 0
    over = ~free & (done > count) & (came > 0)  # what nobody arrives at here need not have begun
    if over.any():
        raise ExecutionError(
            "more tiles arrive at an mbarrier than its phase takes, while its bytes have not come",
            expected=f"{int(count[over][0])} arrivals in each phase",
        )
    phases = np.where(free & (count > 0), done // np.maximum(count, 1), 0)
    state[..., PHASE] += phases
    state[..., MISSING] = count - (done - phases * count)


@rules(ops.mbarrier_wait)
def _(machine, node, args, run):
    state = state_of(machine, args)
    places = places_of(machine, state, args[1])
    parity = np.broadcast_to(certain(args[2]), machine.count)[active_tiles(machine)]

    def waiting() -> np.ndarray:
        return state[..., PHASE][places] & 1 == parity & 1

    def stuck() -> ExecutionError:
        return _deadlock(machine, node, waiting(), state[places], places[-1])

    interleave.wait(machine, lambda: not waiting().any(), stuck, node.loc)
    return ()


def _deadlock(
    machine: Machine, node: Node, waiting: np.ndarray, states: np.ndarray, slots: np.ndarray
) -> ExecutionError:
    """The error for tiles that wait for a phase which nobody is left to end."""
    who = np.argwhere(active_tiles(machine))[waiting][0]
    state, slot = states[waiting][0], int(slots[waiting][0])
    others = "".join(f"; others wait at {place}" for place in interleave.waiting_elsewhere())
    return DeadlockError(
        "deadlock: an mbarrier's phase never ends", location=node.loc,
        expected="as many arrivals, and bytes, as the phase takes",
        received=f"{int(waiting.sum())} tiles wait, first {machine.name([int(i) for i in who])}: mbarrier {slot} is in "
        f"phase {state[PHASE]}, which lacks {_lacks(state)}{others}",
        suggestion="let each phase have its arrivals, and wait for parities 0, 1, 0, … in turn" + _rounds(),
    )  # fmt: skip


def _rounds() -> str:
    """What else may be the matter where a wait stands in a branch."""
    if interleave.SCHEDULER.get() is None:
        return ""
    return "; in a loop tiles meet behind such a branch in every round: let the loop stand in the branch"


def _lacks(state: np.ndarray) -> str:
    """What a phase still needs, in words."""
    arrivals = f"{state[MISSING]} of {state[COUNT]} arrivals"
    if state[BYTES] < 0:
        return f"{arrivals}, and to which {-state[BYTES]} bytes came that were not expected"
    return arrivals + f" and {state[BYTES]} bytes" * bool(state[BYTES])
