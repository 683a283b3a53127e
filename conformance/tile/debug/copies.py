"""Kernels with asynchronous copies, broken and repaired."""

from __future__ import annotations

import tessera as ts
from tessera import tile


@ts.kernel
def early(x, out):
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:8], x[0:8])
    tile.cp_commit_group()
    tile.store(out[0:8], tile.load(row[0:8]))
    tile.cp_wait_group(0)


@ts.kernel
def waited(x, out):
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:8], x[0:8])
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    tile.store(out[0:8], tile.load(row[0:8]))


@ts.kernel
def one_pending(x, out):
    rows = tile.alloc_shared((2, 4), ts.f32)
    for half in tile.range(0, 2):
        tile.cp_async(rows[half, 0:4], x[half * 4 : half * 4 + 4])
        tile.cp_commit_group()
    tile.cp_wait_group(1)
    tile.store(out[0:4], tile.load(rows[1, 0:4]))


@ts.kernel
def none_pending(x, out):
    rows = tile.alloc_shared((2, 4), ts.f32)
    for half in tile.range(0, 2):
        tile.cp_async(rows[half, 0:4], x[half * 4 : half * 4 + 4])
        tile.cp_commit_group()
    tile.cp_wait_group(1)
    tile.store(out[0:4], tile.load(rows[0, 0:4]))
    tile.cp_wait_group(0)
    tile.store(out[4:8], tile.load(rows[1, 0:4]))


@ts.kernel
def first_program_waits(x, out):
    pid = tile.program_id(0)
    row = tile.alloc_shared((4,), ts.f32)
    tile.cp_async(row[0:4], x[pid * 4 : pid * 4 + 4])
    tile.cp_commit_group()
    if pid == 0:
        tile.cp_wait_group(0)
    tile.store(out[pid * 4 : pid * 4 + 4], tile.load(row[0:4]))
    tile.cp_wait_group(0)


@ts.kernel
def each_program_waits(x, out):
    pid = tile.program_id(0)
    row = tile.alloc_shared((4,), ts.f32)
    tile.cp_async(row[0:4], x[pid * 4 : pid * 4 + 4])
    tile.cp_commit_group()
    if pid == 0:
        tile.cp_wait_group(0)
    if pid == 1:
        tile.cp_wait_group(0)
    tile.store(out[pid * 4 : pid * 4 + 4], tile.load(row[0:4]))


@ts.kernel
def source_changed(x, out):
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:8], out[0:8])
    tile.cp_commit_group()
    out[3] = x[3]
    tile.cp_wait_group(0)


@ts.kernel
def source_kept(x, out):
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:8], out[0:8])
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    out[3] = x[3]


@ts.kernel
def target_changed(x, out):
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:8], x[0:8])
    tile.cp_commit_group()
    row[5] = 1.0
    tile.cp_wait_group(0)


@ts.kernel
def target_kept(x, out):
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:8], x[0:8])
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    row[5] = 1.0
    tile.store(out[0:8], tile.load(row[0:8]))


@ts.kernel
def no_barrier(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[me : me + 1], x[me : me + 1])
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    out[me] = row[7 - me]


@ts.kernel
def barrier_after_wait(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[me : me + 1], x[me : me + 1])
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    tile.barrier()
    out[me] = row[7 - me]


@ts.kernel
def neighbour_under_way(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((6,), ts.f32)
    tile.store(row[2 * me + 2 : 2 * me + 4], tile.load(x[0:2]))
    tile.barrier()
    tile.cp_async(row[2 * me : 2 * me + 2], x[2 * me : 2 * me + 2])
    tile.cp_commit_group()
    tile.barrier()
    tile.store(out[2 * me : 2 * me + 2], tile.load(row[2 * me + 2 : 2 * me + 4]))
    tile.cp_wait_group(0)


@ts.kernel
def neighbour_waited_for(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((6,), ts.f32)
    tile.store(row[2 * me + 2 : 2 * me + 4], tile.load(x[0:2]))
    tile.barrier()
    tile.cp_async(row[2 * me : 2 * me + 2], x[2 * me : 2 * me + 2])
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    tile.barrier()
    tile.store(out[2 * me : 2 * me + 2], tile.load(row[2 * me + 2 : 2 * me + 4]))
