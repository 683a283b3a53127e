"""Wrong asynchronous copies, and their repairs: in one tile, and between tiles that share the buffer."""

from __future__ import annotations

import tessera as ts
from conformance.tile.debug.pair import Pair
from tessera import tile
from tessera.core.errors import AsyncCopyError, RaceError


@ts.kernel
def last_stage_early(x, out):
    rows = tile.alloc_shared((2, 2), ts.f32)
    tile.cp_async(rows[0, 0:2], x[0:2])
    tile.cp_commit_group()
    for step in tile.static_range(4):
        if step < 3:
            tile.cp_async(rows[(step + 1) % 2, 0:2], x[2 * step + 2 : 2 * step + 4])
            tile.cp_commit_group()
        tile.cp_wait_group(1)
        tile.store(out[2 * step : 2 * step + 2], tile.load(rows[step % 2, 0:2]))
    tile.cp_wait_group(0)


@ts.kernel
def last_stage_waited(x, out):
    rows = tile.alloc_shared((2, 2), ts.f32)
    tile.cp_async(rows[0, 0:2], x[0:2])
    tile.cp_commit_group()
    for step in tile.static_range(4):
        if step < 3:
            tile.cp_async(rows[(step + 1) % 2, 0:2], x[2 * step + 2 : 2 * step + 4])
            tile.cp_commit_group()
            tile.cp_wait_group(1)
        else:
            tile.cp_wait_group(0)
        tile.store(out[2 * step : 2 * step + 2], tile.load(rows[step % 2, 0:2]))


@ts.kernel
def stage_reused(x, out):
    row = tile.alloc_shared((4,), ts.f32)
    for half in tile.static_range(2):
        tile.cp_async(row[0:4], x[4 * half : 4 * half + 4])
        tile.cp_commit_group()
    tile.cp_wait_group(0)
    tile.store(out[0:4], tile.load(row[0:4]))


@ts.kernel
def stage_in_turn(x, out):
    row = tile.alloc_shared((4,), ts.f32)
    for half in tile.static_range(2):
        tile.cp_async(row[0:4], x[4 * half : 4 * half + 4])
        tile.cp_commit_group()
        tile.cp_wait_group(0)
        tile.store(out[4 * half : 4 * half + 4], tile.load(row[0:4]))


@ts.kernel
def never_waited(x, out):
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:8], x[0:8])
    tile.cp_commit_group()
    tile.store(out[0:8], tile.load(x[0:8]))


@ts.kernel
def waited_at_the_end(x, out):
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:8], x[0:8])
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    tile.store(out[0:8], tile.load(row[0:8]))


@ts.kernel
def updated_on_the_way(x, out):
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:8], x[0:8])
    tile.cp_commit_group()
    tile.atomic_add(row[2], 1.0)
    tile.cp_wait_group(0)
    tile.store(out[0:8], tile.load(row[0:8]))


@ts.kernel
def updated_on_arrival(x, out):
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:8], x[0:8])
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    tile.atomic_add(row[2], 1.0)
    tile.store(out[0:8], tile.load(row[0:8]))


@ts.kernel
def waited_in_one_branch(x, out):
    i = tile.program_id(0)
    row = tile.alloc_shared((1,), ts.f32)
    tile.cp_async(row[0:1], x[i : i + 1])
    tile.cp_commit_group()
    if i < 4:
        tile.cp_wait_group(0)
    out[i] = row[0]


@ts.kernel
def waited_by_all(x, out):
    i = tile.program_id(0)
    row = tile.alloc_shared((1,), ts.f32)
    tile.cp_async(row[0:1], x[i : i + 1])
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    out[i] = row[0]


@ts.kernel
def copied_by_one(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    if me == 0:
        tile.cp_async(row[0:8], x[0:8])
    tile.cp_wait_group(0)
    out[me] = row[me]


@ts.kernel
def copied_by_one_and_met(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    if me == 0:
        tile.cp_async(row[0:8], x[0:8])
    tile.cp_wait_group(0)
    tile.barrier()
    out[me] = row[me]


@ts.kernel
def met_before_the_wait(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[me : me + 1], x[me : me + 1])
    tile.cp_commit_group()
    tile.barrier()
    tile.cp_wait_group(0)
    out[me] = row[7 - me]


@ts.kernel
def met_after_the_wait(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[me : me + 1], x[me : me + 1])
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    tile.barrier()
    out[me] = row[7 - me]


@ts.kernel
def copies_overlap(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((9,), ts.f32)
    if me < 7:
        tile.cp_async(row[me : me + 2], x[me : me + 2])
    tile.cp_wait_group(0)
    tile.barrier()
    out[me] = row[me]
    if me > 0:
        tile.cp_async(row[0:1], x[me : me + 1])
    tile.cp_wait_group(0)


@ts.kernel
def copies_apart(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[me : me + 1], x[me : me + 1])
    tile.cp_wait_group(0)
    tile.barrier()
    out[me] = row[me]


@ts.kernel
def overwritten_by_a_neighbour(x, out):
    me = tile.local_id()
    rows = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(rows[me : me + 1], out[me : me + 1])
    tile.cp_commit_group()
    out[(me + 1) % 8] = x[me]
    tile.cp_wait_group(0)


@ts.kernel
def written_after_all_have_read(x, out):
    me = tile.local_id()
    rows = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(rows[me : me + 1], out[me : me + 1])
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    tile.barrier()
    out[(me + 1) % 8] = x[me]


@ts.kernel
def counted_and_grouped(x, out):
    """An mbarrier counts the bytes of a copy, and the tile that began it waits for its group as well."""
    me, row, ready = tile.local_id(), tile.alloc_shared((8,), ts.f32), tile.mbarrier(1)
    tile.barrier()
    if me == 0:
        ready.expect(32)
        tile.cp_async(row[0:8], x[0:8], barrier=ready)
        tile.cp_commit_group()
        tile.cp_wait_group(0)
        ready.arrive()
    out[me] = row[me]


@ts.kernel
def counted_and_waited(x, out):
    me, row, ready = tile.local_id(), tile.alloc_shared((8,), ts.f32), tile.mbarrier(1)
    tile.barrier()
    if me == 0:
        ready.expect(32)
        tile.cp_async(row[0:8], x[0:8], barrier=ready)
        tile.cp_commit_group()
        tile.cp_wait_group(0)
        ready.arrive()
    ready.wait(0)
    out[me] = row[me]


@ts.kernel
def read_before_it_is_counted(x, out):
    """Each tile copies its own element, and only one waits until all are there."""
    me, row, ready = tile.local_id(), tile.alloc_shared((8,), ts.f32), tile.mbarrier(8)
    tile.barrier()
    ready.expect(4)
    tile.cp_async(row[me : me + 1], x[me : me + 1], barrier=ready)
    ready.arrive()
    if me == 0:
        ready.wait(0)
    out[me] = row[(me + 1) % 8]


@ts.kernel
def read_when_it_is_counted(x, out):
    me, row, ready = tile.local_id(), tile.alloc_shared((8,), ts.f32), tile.mbarrier(8)
    tile.barrier()
    ready.expect(4)
    tile.cp_async(row[me : me + 1], x[me : me + 1], barrier=ready)
    ready.arrive()
    ready.wait(0)
    out[me] = row[(me + 1) % 8]


PAIRS = {
    "last-stage-early": Pair(
        "M8", last_stage_early, last_stage_waited, AsyncCopyError, ("copy to it is under way",), None, (1,)
    ),
    "stage-reused": Pair("M8", stage_reused, stage_in_turn, AsyncCopyError, ("writes", "copy to it"), None, (1,)),
    "never-waited": Pair("M8", never_waited, waited_at_the_end, AsyncCopyError, ("never waited for",), None, (1,)),
    "updated-on-the-way": Pair(
        "M8", updated_on_the_way, updated_on_arrival, AsyncCopyError, ("updates", "copy to it"), None, (1,)
    ),
    "waited-in-one-branch": Pair(
        "M8", waited_in_one_branch, waited_by_all, AsyncCopyError, ("program (4,)", "copy to it is under way")
    ),
    "copied-by-one": Pair("M9", copied_by_one, copied_by_one_and_met, RaceError, ("tile 0 writes it", "no barrier"), 8),
    "met-before-the-wait": Pair("M9", met_before_the_wait, met_after_the_wait, RaceError, ("no barrier",), 8),
    "copies-overlap": Pair("M9", copies_overlap, copies_apart, RaceError, ("writes it", "cp_async"), 8),
    "counted-and-grouped": Pair(
        "M13", counted_and_grouped, counted_and_waited, RaceError, ("no wait at the mbarrier that counts the copy",), 8
    ),
    "read-before-it-is-counted": Pair(
        "M13", read_before_it_is_counted, read_when_it_is_counted, RaceError, ("no wait at the mbarrier",), 8
    ),
    "overwritten-by-a-neighbour": Pair(
        "M8", overwritten_by_a_neighbour, written_after_all_have_read, AsyncCopyError, ("copy from it is under way",), 8
    ),
}
