"""Copies with mbarrier transaction counts, and waits that are too short; each with its repair."""

from __future__ import annotations

import tessera as ts
from conformance.tile.debug.pair import Pair
from tessera import tile
from tessera.core.errors import AsyncCopyError, RaceError


@ts.kernel
def copy_counted_by_the_other_stage(x, out):
    me = tile.local_id()
    buffer, full = tile.alloc_shared((2, 4), ts.f32), tile.mbarrier(1, 2)
    tile.barrier()
    if me == 0:
        for k in tile.static_range(2):
            full[1 - k].expect(16)
            tile.cp_async(buffer[k, 0:4], x[4 * k : 4 * k + 4], barrier=full[1 - k])
            full[1 - k].arrive()
    full[0].wait(0)
    out[me] = tile.sum(buffer[0, 0:4])
    full[1].wait(0)


@ts.kernel
def copy_counted_by_its_stage(x, out):
    me = tile.local_id()
    buffer, full = tile.alloc_shared((2, 4), ts.f32), tile.mbarrier(1, 2)
    tile.barrier()
    if me == 0:
        for k in tile.static_range(2):
            full[k].expect(16)
            tile.cp_async(buffer[k, 0:4], x[4 * k : 4 * k + 4], barrier=full[k])
            full[k].arrive()
    full[0].wait(0)
    out[me] = tile.sum(buffer[0, 0:4])
    full[1].wait(0)


@ts.kernel
def copy_waited_for_by_one(x, out):
    me = tile.local_id()
    row, full = tile.alloc_shared((8,), ts.f32), tile.mbarrier(1)
    tile.barrier()
    if me == 0:
        full.expect(32)
        tile.cp_async(row[0:8], x[0:8], barrier=full)
        full.arrive()
        full.wait(0)
    out[me] = row[me]


@ts.kernel
def copy_waited_for_by_all(x, out):
    me = tile.local_id()
    row, full = tile.alloc_shared((8,), ts.f32), tile.mbarrier(1)
    tile.barrier()
    if me == 0:
        full.expect(32)
        tile.cp_async(row[0:8], x[0:8], barrier=full)
        full.arrive()
    full.wait(0)
    out[me] = row[me]


@ts.kernel
def alone_at_the_wrong_stage(x, out):
    buffer, full = tile.alloc_shared((2, 4), ts.f32), tile.mbarrier(1, 2)
    for k in tile.static_range(2):
        full[k].expect(16)
        tile.cp_async(buffer[k, 0:4], x[4 * k : 4 * k + 4], barrier=full[k])
        full[k].arrive()
    for k in tile.static_range(2):
        full[1 - k].wait(0)
        out[4 * k : 4 * k + 4] = buffer[k, 0:4]


@ts.kernel
def alone_at_its_stage(x, out):
    buffer, full = tile.alloc_shared((2, 4), ts.f32), tile.mbarrier(1, 2)
    for k in tile.static_range(2):
        full[k].expect(16)
        tile.cp_async(buffer[k, 0:4], x[4 * k : 4 * k + 4], barrier=full[k])
        full[k].arrive()
    for k in tile.static_range(2):
        full[k].wait(0)
        out[4 * k : 4 * k + 4] = buffer[k, 0:4]


@ts.kernel
def counted_copy_never_waited_for(x, out):
    row, full = tile.alloc_shared((8,), ts.f32), tile.mbarrier(1)
    full.expect(32)
    tile.cp_async(row[0:8], x[0:8], barrier=full)
    full.arrive()
    tile.store(out[0:8], tile.load(x[0:8]))


@ts.kernel
def counted_copy_waited_for(x, out):
    row, full = tile.alloc_shared((8,), ts.f32), tile.mbarrier(1)
    full.expect(32)
    tile.cp_async(row[0:8], x[0:8], barrier=full)
    full.arrive()
    full.wait(0)
    tile.store(out[0:8], tile.load(row[0:8]))


@ts.kernel
def stage_filled_again_under_way(x, out):
    row, full = tile.alloc_shared((4,), ts.f32), tile.mbarrier(1)
    for k in tile.static_range(2):
        full.expect(16)
        tile.cp_async(row[0:4], x[4 * k : 4 * k + 4], barrier=full)
        full.arrive()
        if k == 1:
            full.wait(1)
            tile.store(out[0:4], tile.load(row[0:4]))


@ts.kernel
def stage_filled_again_when_read(x, out):
    row, full = tile.alloc_shared((4,), ts.f32), tile.mbarrier(1)
    for k in tile.static_range(2):
        full.expect(16)
        tile.cp_async(row[0:4], x[4 * k : 4 * k + 4], barrier=full)
        full.arrive()
        full.wait(k)
        tile.store(out[4 * k : 4 * k + 4], tile.load(row[0:4]))


PAIRS = {
    "copy-of-the-other-stage": Pair(
        "M8", copy_counted_by_the_other_stage, copy_counted_by_its_stage, AsyncCopyError,
        ("tile 0 reads", "while an asynchronous copy that writes it is under way", "its stage and its parity"), 8,
    ),
    "copy-waited-for-by-one": Pair(
        "M13", copy_waited_for_by_one, copy_waited_for_by_all, RaceError,
        ("tile 1 reads it", "tile 0 began writes it", "no wait at the mbarrier"), 8,
    ),
    "alone-at-the-wrong-stage": Pair(
        "M8", alone_at_the_wrong_stage, alone_at_its_stage, AsyncCopyError,
        ("while an asynchronous copy that writes it is under way", "its stage and its parity"), None, (1,),
    ),
    "counted-but-never-waited-for": Pair(
        "M8", counted_copy_never_waited_for, counted_copy_waited_for, AsyncCopyError, ("never waited for",), None, (1,),
    ),
    "filled-again-under-way": Pair(
        "M8", stage_filled_again_under_way, stage_filled_again_when_read, AsyncCopyError,
        ("writes the shared", "copy that writes it is under way"), None, (1,),
    ),
}  # fmt: skip
