"""Grid barriers: kernels with a missing or wrong one, each with its repair."""

from __future__ import annotations

import tessera as ts
from conformance.tile.debug.pair import Pair
from tessera import tile
from tessera.core.errors import BarrierError, RaceError


@ts.kernel
def turned_at_once(x, out):
    i, n = tile.program_id(0), tile.num_programs(0)
    out[i] = x[i]
    x[i] = out[n - 1 - i]


@ts.kernel
def turned(x, out):
    i, n = tile.program_id(0), tile.num_programs(0)
    out[i] = x[i]
    tile.grid_barrier()
    x[i] = out[n - 1 - i]


@ts.kernel
def met_too_soon(x, out):
    i, n = tile.program_id(0), tile.num_programs(0)
    tile.grid_barrier()
    out[i] = x[i]
    x[i] = out[n - 1 - i]


@ts.kernel
def group_barrier_alone(x, out):
    me = tile.linear_id()
    out[me] = x[me]
    tile.barrier()
    x[me] = out[7 - me]


@ts.kernel
def all_groups_meet(x, out):
    me = tile.linear_id()
    out[me] = x[me]
    tile.grid.sync()
    x[me] = out[7 - me]


@ts.kernel
def steps_meet_once(x, out):
    i, n = tile.program_id(0), tile.num_programs(0)
    for _ in tile.range(0, 3):
        out[i] = x[(i + 1) % n]
        tile.grid_barrier()
        x[i] = out[i] * 0.5


@ts.kernel
def steps_meet_twice(x, out):
    i, n = tile.program_id(0), tile.num_programs(0)
    for _ in tile.range(0, 3):
        out[i] = x[(i + 1) % n]
        tile.grid_barrier()
        x[i] = out[i] * 0.5
        tile.grid_barrier()


@ts.kernel
def half_the_grid(x, out):
    i = tile.program_id(0)
    out[i] = x[i]
    if i < 4:
        tile.grid_barrier()


@ts.kernel
def uneven_rounds(x, out):
    i = tile.program_id(0)
    for _ in tile.range(0, 1 + i % 2):
        out[i] = x[i]
        tile.grid_barrier()


@ts.kernel
def even_rounds(x, out):
    i = tile.program_id(0)
    for _ in tile.range(0, 2):
        out[i] = x[i]
        tile.grid_barrier()


@ts.kernel
def after_the_branch(x, out):
    i = tile.program_id(0)
    if i < 4:
        out[i] = x[i]
    tile.grid_barrier()
    if i >= 4:
        out[i] = out[7 - i]


PARTED = ("a grid barrier is reached by program", "of 8", "tile.grid_barrier()")
PAIRS = {
    "turned-at-once": Pair("M5", turned_at_once, turned, RaceError, ("a data race on out[", "program")),
    "grid-met-too-soon": Pair("M5", met_too_soon, turned, RaceError, ("a data race on out[", "program")),
    "groups-that-do-not-meet": Pair(
        "M5", group_barrier_alone, all_groups_meet, RaceError, ("a data race on out[", "tile"), 4, (2,)
    ),
    "grid-steps-meet-once": Pair("M5", steps_meet_once, steps_meet_twice, RaceError, ("a data race on x[",)),
    "half-the-grid": Pair("M14", half_the_grid, after_the_branch, BarrierError, PARTED),
    "uneven-rounds-of-a-grid": Pair("M14", uneven_rounds, even_rounds, BarrierError, PARTED),
}
