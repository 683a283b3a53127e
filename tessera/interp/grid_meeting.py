"""The barrier of a whole grid: all programs run side by side, so that only a condition that parts them goes wrong."""

from __future__ import annotations

import numpy as np

from tessera.errors import BarrierError
from tessera.interp.machine import Machine
from tessera.op import Rules
from tessera.ops import tile

rules = Rules("tile grid barrier")


@rules(tile.grid_barrier)
def _(machine, node, args, run):
    here = present(machine)
    if not here.all():
        raise parted(machine, here)
    return ()


def present(machine: Machine) -> np.ndarray:
    """Which instances of the whole launch run here."""
    tiles = (machine.group,) if machine.group > 1 else ()
    here = np.zeros((*machine.grid, *tiles), bool)
    box = tuple(slice(f, f + n) for f, n in zip(machine.first, machine.count, strict=True))
    here[box] = True if machine.active is None else machine.active
    return here


def parted(machine: Machine, here: np.ndarray) -> BarrierError:
    """What to say where some instances reach a grid barrier and others do not."""
    came, missing = (named(machine, tuple(int(i) for i in np.argwhere(w)[0])) for w in (here, ~here))
    return BarrierError(
        f"a grid barrier is reached by {came} and not by {missing}: by {int(here.sum())} of {here.size}",
        expected="all programs of the launch, with all their tiles, at the same barrier",
        suggestion="move it out of the `if` or loop whose condition differs between programs",
    )


def named(machine: Machine, place: tuple[int, ...]) -> str:
    """An instance of the launch in words."""
    rank = len(machine.grid)
    return f"program {place[:rank]}" + (f", tile {place[rank]}" if machine.group > 1 else "")
