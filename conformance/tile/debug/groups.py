"""Kernels of tiles in groups, broken and repaired: shared memory, barriers, atomics."""

from __future__ import annotations

import tessera as ts
from tessera import tile


@ts.kernel
def long_row(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me + 1] = x[me]


@ts.kernel
def long_row_masked(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    if me < 7:
        row[me + 1] = x[me]


@ts.kernel
def half_filled(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    if me < 4:
        row[me] = x[me]
    tile.barrier()
    out[me] = row[me]


@ts.kernel
def all_filled(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    out[me] = row[me]


@ts.kernel
def register_exchange(x, out):
    me = tile.local_id()
    row = tile.alloc_register((8,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    out[me] = row[7 - me]


@ts.kernel
def shared_exchange(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    out[me] = row[7 - me]


@ts.kernel
def mirrored_at_once(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    out[me] = row[7 - me]


@ts.kernel
def mirrored(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    out[me] = row[7 - me]


@ts.kernel
def reused_at_once(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    total = 0.0
    for step in tile.range(0, 3):
        row[me] = x[me] * step
        tile.barrier()
        total += row[7 - me]
    out[me] = total


@ts.kernel
def reused_later(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    total = 0.0
    for step in tile.range(0, 3):
        row[me] = x[me] * step
        tile.barrier()
        total += row[7 - me]
        tile.barrier()
    out[me] = total


@ts.kernel
def neighbour_at_once(x, out):
    me = tile.local_id()
    out[me] = x[me]
    if me > 0:
        x[me] = out[me - 1]


@ts.kernel
def neighbour_later(x, out):
    me = tile.local_id()
    out[me] = x[me]
    tile.barrier()
    if me > 0:
        x[me] = out[me - 1]


@ts.kernel
def tree_without_barriers(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    stride = 4
    while stride > 0:
        if me < stride:
            row[me] += row[me + stride]
        stride //= 2
    out[me] = x[me]


@ts.kernel
def tree(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    tile.barrier()
    stride = 4
    while stride > 0:
        if me < stride:
            row[me] += row[me + stride]
        tile.barrier()
        stride //= 2
    out[me] = row[0]


@ts.kernel
def own_number(x, out):
    me = tile.local_id()
    out[0] = x[me]


@ts.kernel
def same_number(x, out):
    me = tile.local_id()
    out[0] = x[0]
    tile.barrier()
    if me > 0:
        out[me] = x[me]


@ts.kernel
def barrier_in_branch(x, out):
    me = tile.local_id()
    if me < 3:
        tile.barrier()
    out[me] = x[me]


@ts.kernel
def barrier_after_branch(x, out):
    me = tile.local_id()
    if me < 3:
        out[me] = x[me]
    tile.barrier()


@ts.kernel
def barrier_in_uneven_loop(x, out):
    me = tile.local_id()
    for _step in tile.range(0, me + 1):
        tile.barrier()
    out[me] = x[me]


@ts.kernel
def barrier_in_even_loop(x, out):
    me = tile.local_id()
    for _step in tile.range(0, 8):
        tile.barrier()
    out[me] = x[me]


@ts.kernel
def atomic_and_plain(x, out):
    me = tile.local_id()
    count = tile.alloc_shared((1,), ts.f32)
    if me == 0:
        count[0] = 0.0
    tile.barrier()
    tile.atomic_add(count[0], 1.0)
    out[me] = x[me] + count[0]


@ts.kernel
def atomic_then_plain(x, out):
    me = tile.local_id()
    count = tile.alloc_shared((1,), ts.f32)
    if me == 0:
        count[0] = 0.0
    tile.barrier()
    tile.atomic_add(count[0], 1.0)
    tile.barrier()
    out[me] = x[me] + count[0]


@ts.kernel
def met_in_half_the_group(x, out):
    me, half = tile.local_id(), tile.cooperative_group(4)
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    half.sync()
    out[me] = row[7 - me]


@ts.kernel
def met_in_the_half_that_shares(x, out):
    me, half = tile.local_id(), tile.cooperative_group(4)
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    half.sync()
    out[me] = row[me - me % 4 + 3 - me % 4]


@ts.kernel
def half_a_warp_meets(x, out):
    me, four = tile.local_id(), tile.cooperative_group(4)
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    if me < 6:
        four.sync()
    tile.barrier()
    out[me] = row[7 - me]


@ts.kernel
def whole_stretches_meet(x, out):
    me, four = tile.local_id(), tile.cooperative_group(4)
    row = tile.alloc_shared((8,), ts.f32)
    row[me] = x[me]
    if me < 4:
        four.sync()
    tile.barrier()
    out[me] = row[7 - me]


@ts.kernel
def sum_of_some(x, out):
    me = tile.local_id()
    total = 0.0
    if me < 5:
        total = tile.block.reduce_sum(x[me])
    out[me] = total


@ts.kernel
def sum_of_all(x, out):
    me = tile.local_id()
    total = tile.block.reduce_sum(tile.where(me < 5, x[me], 0.0))
    out[me] = total
