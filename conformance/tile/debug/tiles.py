"""Races between the tiles of a group, and divergent barriers; each with its repair."""

from __future__ import annotations

import tessera as ts
from conformance.tile.debug.pair import Pair
from tessera import tile
from tessera.core.errors import BarrierError, RaceError


@ts.kernel
def neighbour(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((9,), ts.f32)
    row[me] = x[me]
    row[8] = 0.0
    out[me] = row[me] + row[me + 1]


@ts.kernel
def neighbour_met(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((9,), ts.f32)
    row[me] = x[me]
    row[8] = 0.0
    tile.barrier()
    out[me] = row[me] + row[me + 1]


@ts.kernel
def shared_counts(x, out):
    me = tile.local_id()
    counts = tile.alloc_shared((2,), ts.f32)
    counts[me % 2] = 0.0
    tile.barrier()
    counts[me % 2] += 1.0
    tile.barrier()
    out[me] = counts[me % 2]


@ts.kernel
def shared_counts_atomic(x, out):
    me = tile.local_id()
    counts = tile.alloc_shared((2,), ts.f32)
    counts[me % 2] = 0.0
    tile.barrier()
    tile.atomic_add(counts[me % 2], 1.0)
    tile.barrier()
    out[me] = counts[me % 2]


@ts.kernel
def barrier_too_early(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    tile.barrier()
    row[me] = x[me]
    out[me] = row[(me + 1) % 8]


@ts.kernel
def barrier_in_time(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    out[me] = row[(me + 1) % 8]


@ts.kernel
def one_buffer(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    for _step in tile.range(0, 3):
        tile.barrier()
        row[me] = row[(me + 1) % 8] * 2.0
    out[me] = row[me]


@ts.kernel
def two_buffers(x, out):
    me = tile.local_id()
    rows = tile.alloc_shared((2, 8), ts.f32)
    rows[0, me] = x[me]
    for step in tile.range(0, 3):
        tile.barrier()
        rows[(step + 1) % 2, me] = rows[step % 2, (me + 1) % 8] * 2.0
    out[me] = rows[1, me]


@ts.kernel
def scan_in_place(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    for k in tile.static_range(3):
        tile.barrier()
        if me >= 2**k:
            row[me] = row[me] + row[me - 2**k]
    out[me] = row[me]


@ts.kernel
def scan_in_turn(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    total = x[me]
    row[me] = total
    for k in tile.static_range(3):
        tile.barrier()
        if me >= 2**k:
            total += row[me - 2**k]
        tile.barrier()
        row[me] = total
    out[me] = total


@ts.kernel
def swapped_in_place(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    other = row[7 - me]
    row[me] = other
    tile.barrier()
    out[me] = row[me]


@ts.kernel
def swapped_in_turn(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    other = row[7 - me]
    tile.barrier()
    row[me] = other
    out[me] = row[me]


@ts.kernel
def flag(x, out):
    me = tile.local_id()
    found = tile.alloc_shared((1,), ts.f32)
    if me == 3:
        found[0] = x[me]
    out[me] = found[0]


@ts.kernel
def flag_met(x, out):
    me = tile.local_id()
    found = tile.alloc_shared((1,), ts.f32)
    if me == 3:
        found[0] = x[me]
    tile.barrier()
    out[me] = found[0]


@ts.kernel
def in_step_as_a_warp(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    if me < 4:
        row[me] = row[me] + row[me + 4]
    if me < 2:
        row[me] = row[me] + row[me + 2]
    out[me] = row[me]


@ts.kernel
def in_step_by_barriers(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    if me < 4:
        row[me] = row[me] + row[me + 4]
    tile.barrier()
    if me < 2:
        row[me] = row[me] + row[me + 2]
    out[me] = row[me]


@ts.kernel
def last_one_wins(x, out):
    me = tile.local_id()
    best = tile.alloc_shared((1,), ts.f32)
    if x[me] > 4.0:
        best[0] = x[me]
    tile.barrier()
    out[me] = best[0]


@ts.kernel
def greatest_wins(x, out):
    me = tile.local_id()
    best = tile.alloc_shared((1,), ts.f32)
    best[0] = 0.0
    tile.barrier()
    tile.atomic_max(best[0], x[me])
    tile.barrier()
    out[me] = best[0]


@ts.kernel
def early_return(x, out):
    me = tile.local_id()
    if me >= 4:
        out[me] = 0.0
    else:
        tile.barrier()
        out[me] = x[me]


@ts.kernel
def late_return(x, out):
    me = tile.local_id()
    tile.barrier()
    if me >= 4:
        out[me] = 0.0
    else:
        out[me] = x[me]


@ts.kernel
def barrier_while_data_lasts(x, out):
    me = tile.local_id()
    value = x[me]
    while value > 1.0:
        tile.barrier()
        value = value * 0.5
    out[me] = value


@ts.kernel
def barrier_for_all(x, out):
    me = tile.local_id()
    value = x[me]
    for _step in tile.range(0, 3):
        tile.barrier()
        value = tile.where(value > 1.0, value * 0.5, value)
    out[me] = value


def meet_and_read(row, me):
    tile.barrier()
    return row[7 - me]


@ts.kernel
def barrier_in_a_call(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    if x[me] > 2.0:
        out[me] = meet_and_read(row, me)


@ts.kernel
def call_for_all(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    found = meet_and_read(row, me)
    if x[me] > 2.0:
        out[me] = found


PAIRS = {
    "neighbour": Pair("M4", neighbour, neighbour_met, RaceError, ("shared memory", "tile", "no barrier"), 8),
    "shared-counts": Pair("M4", shared_counts, shared_counts_atomic, RaceError, ("tile", "no barrier"), 8),
    "barrier-too-early": Pair("M4", barrier_too_early, barrier_in_time, RaceError, ("writes it", "reads it"), 8),
    "one-buffer": Pair("M4", one_buffer, two_buffers, RaceError, ("writes it", "reads it"), 8),
    "scan-in-place": Pair("M4", scan_in_place, scan_in_turn, RaceError, ("tile", "no barrier"), 8),
    "swapped-in-place": Pair("M4", swapped_in_place, swapped_in_turn, RaceError, ("writes it", "reads it"), 8),
    "flag": Pair("M4", flag, flag_met, RaceError, ("tile 3 writes it",), 8),
    "in-step-as-a-warp": Pair("M4", in_step_as_a_warp, in_step_by_barriers, RaceError, ("no barrier",), 8),
    "last-one-wins": Pair("M6", last_one_wins, greatest_wins, RaceError, ("writes it", "tile"), 8),
    "early-return": Pair(
        "M7", early_return, late_return, BarrierError, ("tiles 0, 1, 2, 3 of program (0,), 4 of 8",), 8
    ),
    "barrier-while-data-lasts": Pair(
        "M7", barrier_while_data_lasts, barrier_for_all, BarrierError, ("7 of 8", "tile.barrier()"), 8
    ),
    "barrier-in-a-call": Pair("M7", barrier_in_a_call, call_for_all, BarrierError, ("6 of 8",), 8),
}
