"""Deadlocks at mbarriers, and their repairs."""

from __future__ import annotations

import tessera as ts
from conformance.tile.debug.pair import Pair
from tessera import tile
from tessera.core.errors import DeadlockError


@ts.kernel
def one_arrival_short(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    full = tile.mbarrier(8)
    tile.barrier()
    row[me] = x[me]
    if me < 7:
        full.arrive()
    full.wait(0)
    out[me] = row[7 - me]


@ts.kernel
def all_arrive(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    full = tile.mbarrier(8)
    tile.barrier()
    row[me] = x[me]
    full.arrive()
    full.wait(0)
    out[me] = row[7 - me]


@ts.kernel
def wrong_parity(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    full = tile.mbarrier(8)
    tile.barrier()
    for step in tile.static_range(2):
        row[me] = x[me]
        full.arrive()
        full.wait(0 if step == 1 else 0)
        tile.barrier()
    full.wait(0)
    out[me] = row[7 - me]


@ts.kernel
def parities_in_turn(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    full = tile.mbarrier(8)
    tile.barrier()
    for step in tile.static_range(2):
        row[me] = x[me]
        full.arrive()
        full.wait(step % 2)
        tile.barrier()
    out[me] = row[7 - me]


@ts.kernel
def too_many_bytes_expected(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    full = tile.mbarrier(8)
    tile.barrier()
    full.expect(8)
    tile.cp_async(row[me : me + 1], x[me : me + 1], barrier=full)
    full.arrive()
    full.wait(0)
    out[me] = row[7 - me]


@ts.kernel
def bytes_that_come(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((8,), ts.f32)
    full = tile.mbarrier(8)
    tile.barrier()
    full.expect(4)
    tile.cp_async(row[me : me + 1], x[me : me + 1], barrier=full)
    full.arrive()
    full.wait(0)
    out[me] = row[7 - me]


PAIRS = {
    "one-arrival-short": Pair("M12", one_arrival_short, all_arrive, DeadlockError, ("deadlock", "8 tiles wait"), 8),
    "wrong-parity": Pair("M12", wrong_parity, parities_in_turn, DeadlockError, ("deadlock", "8 tiles wait"), 8),
    "bytes-that-never-come": Pair("M12", too_many_bytes_expected, bytes_that_come, DeadlockError, ("deadlock",), 8),
}
