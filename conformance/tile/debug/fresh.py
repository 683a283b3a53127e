"""Uninitialised reads, and memory used outside its scope; each with its repair."""

from __future__ import annotations

import tessera as ts
from conformance.tile.debug.pair import Pair
from tessera import tile
from tessera.core.errors import UninitializedError


@ts.kernel
def short_copy(x, out):
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:4], x[0:4])
    tile.cp_wait_group(0)
    tile.store(out[0:8], tile.load(row[0:8]))


@ts.kernel
def whole_copy(x, out):
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:8], x[0:8])
    tile.cp_wait_group(0)
    tile.store(out[0:8], tile.load(row[0:8]))


@ts.kernel
def written_in_one_branch(x, out):
    i = tile.program_id(0)
    held = tile.alloc_register((1,), ts.f32)
    if x[i] > 4.0:
        held[0] = x[i]
    out[i] = held[0]


@ts.kernel
def written_in_both(x, out):
    i = tile.program_id(0)
    held = tile.alloc_register((1,), ts.f32)
    if x[i] > 4.0:
        held[0] = x[i]
    else:
        held[0] = 0.0
    out[i] = held[0]


@ts.kernel
def counted_from_nothing(x, out):
    me = tile.local_id()
    count = tile.alloc_shared((1,), ts.f32)
    tile.atomic_add(count[0], 1.0)
    tile.barrier()
    out[me] = count[0]


@ts.kernel
def counted_from_zero(x, out):
    me = tile.local_id()
    count = tile.alloc_shared((1,), ts.f32)
    if me == 0:
        count[0] = 0.0
    tile.barrier()
    tile.atomic_add(count[0], 1.0)
    tile.barrier()
    out[me] = count[0]


@ts.kernel
def anew_each_time(x, out):
    i = tile.program_id(0)
    total = 0.0
    for j in tile.range(0, 2):
        held = tile.alloc_register((1,), ts.f32)
        if j == 0:
            held[0] = x[i]
        total += held[0]
    out[i] = total


@ts.kernel
def once_for_all(x, out):
    i = tile.program_id(0)
    total = 0.0
    held = tile.alloc_register((1,), ts.f32)
    for j in tile.range(0, 2):
        if j == 0:
            held[0] = x[i]
        total += held[0]
    out[i] = total


@ts.kernel
def masked_gap(x, out):
    row = tile.alloc_register((8,), ts.f32)
    places = tile.arange(0, 8)
    tile.store(row, places, tile.load(x, places), mask=places % 3 != 0)
    tile.store(out, places, tile.load(row, places))


@ts.kernel
def no_gap(x, out):
    row = tile.alloc_register((8,), ts.f32)
    places = tile.arange(0, 8)
    tile.store(row, places, tile.where(places % 3 != 0, tile.load(x, places), 0.0))
    tile.store(out, places, tile.load(row, places))


@ts.kernel
def padded_reduction(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((16,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    out[me] = row[me] + row[me + 8]


@ts.kernel
def padded_with_zeros(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((16,), ts.f32)
    row[me] = x[me]
    row[me + 8] = 0.0
    tile.barrier()
    out[me] = row[me] + row[me + 8]


@ts.kernel
def wrong_row(x, out):
    me = tile.local_id()
    rows = tile.alloc_shared((2, 8), ts.f32)
    rows[0, me] = x[me]
    tile.barrier()
    out[me] = rows[1, 7 - me]


@ts.kernel
def right_row(x, out):
    me = tile.local_id()
    rows = tile.alloc_shared((2, 8), ts.f32)
    rows[1, me] = x[me]
    tile.barrier()
    out[me] = rows[1, 7 - me]


@ts.kernel
def left_by_another_program(x, out):
    i = tile.program_id(0)
    row = tile.alloc_shared((1,), ts.f32)
    if i == 0:
        row[0] = x[0]
    out[i] = row[0]


@ts.kernel
def each_for_itself(x, out):
    i = tile.program_id(0)
    row = tile.alloc_shared((1,), ts.f32)
    row[0] = x[0]
    out[i] = row[0]


PAIRS = {
    "short-copy": Pair("M2", short_copy, whole_copy, UninitializedError, ("[4] is read before",), None, (1,)),
    "written-in-one-branch": Pair(
        "M2", written_in_one_branch, written_in_both, UninitializedError, ("register memory", "program (0,)")
    ),
    "counted-from-nothing": Pair(
        "M2", counted_from_nothing, counted_from_zero, UninitializedError, ("[0] is read before", "tile 0"), 8
    ),
    "anew-each-time": Pair("M2", anew_each_time, once_for_all, UninitializedError, ("held[0]", "program (0,)")),
    "masked-gap": Pair("M2", masked_gap, no_gap, UninitializedError, ("[0] is read before",), None, (1,)),
    "padded-reduction": Pair(
        "M2", padded_reduction, padded_with_zeros, UninitializedError, ("[8] is read", "tile 0"), 8
    ),
    "wrong-row": Pair("M2", wrong_row, right_row, UninitializedError, ("[1, 7] is read before", "tile 0"), 8),
    "another-programs": Pair(
        "M3", left_by_another_program, each_for_itself, UninitializedError, ("shared memory", "program (1,)")
    ),
}
