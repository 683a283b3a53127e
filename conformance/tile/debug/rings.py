"""Producers and consumers of ring buffers with mbarriers, broken and repaired.

Eight tiles: tile 0 produces, the others consume; x holds four stages of two elements.
"""

from __future__ import annotations

import tessera as ts
from conformance.tile.debug.pair import Pair
from tessera import tile
from tessera.core.errors import RaceError


@ts.kernel
def in_turn(x, out):
    me = tile.local_id()
    buffer = tile.alloc_shared((2, 2), ts.f32)
    full, empty = tile.mbarrier(1, 2), tile.mbarrier(7, 2)
    tile.barrier()
    if me == 0:
        for k in tile.static_range(6):
            empty[k % 2].wait((k // 2 + 1) % 2)
            buffer[k % 2, 0:2] = x[k % 4 * 2 : k % 4 * 2 + 2]
            full[k % 2].arrive()
    else:
        total = tile.zeros((2,))
        for k in tile.static_range(6):
            full[k % 2].wait(k // 2 % 2)
            total = total + buffer[k % 2, 0:2]
            empty[k % 2].arrive()
        out[me] = tile.sum(total)


@ts.kernel
def reused_before_release(x, out):
    me = tile.local_id()
    buffer = tile.alloc_shared((2, 2), ts.f32)
    full, empty = tile.mbarrier(1, 2), tile.mbarrier(7, 2)
    tile.barrier()
    if me == 0:
        for k in tile.static_range(6):
            buffer[k % 2, 0:2] = x[k % 4 * 2 : k % 4 * 2 + 2]
            full[k % 2].arrive()
    else:
        total = tile.zeros((2,))
        for k in tile.static_range(6):
            full[k % 2].wait(k // 2 % 2)
            total = total + buffer[k % 2, 0:2]
            empty[k % 2].arrive()
        out[me] = tile.sum(total)


@ts.kernel
def arrived_before_writing(x, out):
    me = tile.local_id()
    buffer = tile.alloc_shared((2, 2), ts.f32)
    full, empty = tile.mbarrier(1, 2), tile.mbarrier(7, 2)
    tile.barrier()
    if me == 0:
        for k in tile.static_range(6):
            empty[k % 2].wait((k // 2 + 1) % 2)
            full[k % 2].arrive()
            buffer[k % 2, 0:2] = x[k % 4 * 2 : k % 4 * 2 + 2]
    else:
        total = tile.zeros((2,))
        for k in tile.static_range(6):
            full[k % 2].wait(k // 2 % 2)
            total = total + buffer[k % 2, 0:2]
            empty[k % 2].arrive()
        out[me] = tile.sum(total)


@ts.kernel
def waits_for_the_other_stage(x, out):
    me = tile.local_id()
    buffer, full = tile.alloc_shared((2, 4), ts.f32), tile.mbarrier(1, 2)
    tile.barrier()
    if me == 0:
        for k in tile.static_range(2):
            buffer[k, 0:4] = x[4 * k : 4 * k + 4]
            full[k].arrive()
    else:
        full[0].wait(0)
        out[me] = tile.sum(buffer[1, 0:4])


@ts.kernel
def waits_for_its_stage(x, out):
    me = tile.local_id()
    buffer, full = tile.alloc_shared((2, 4), ts.f32), tile.mbarrier(1, 2)
    tile.barrier()
    if me == 0:
        for k in tile.static_range(2):
            buffer[k, 0:4] = x[4 * k : 4 * k + 4]
            full[k].arrive()
    else:
        full[1].wait(0)
        out[me] = tile.sum(buffer[1, 0:4])


@ts.kernel
def waits_for_the_first_phase_again(x, out):
    me = tile.local_id()
    row, full, empty = tile.alloc_shared((4,), ts.f32), tile.mbarrier(1), tile.mbarrier(7)
    tile.barrier()
    if me == 0:
        row[0:4] = x[0:4]
        full.arrive()
        empty.wait(0)
        row[0:4] = x[4:8]
        full.arrive()
    else:
        full.wait(0)
        first = tile.sum(row[0:4])
        empty.arrive()
        full.wait(0)
        out[me] = first + tile.sum(row[0:4])


@ts.kernel
def waits_for_each_phase(x, out):
    me = tile.local_id()
    row, full, empty = tile.alloc_shared((4,), ts.f32), tile.mbarrier(1), tile.mbarrier(7)
    tile.barrier()
    if me == 0:
        row[0:4] = x[0:4]
        full.arrive()
        empty.wait(0)
        row[0:4] = x[4:8]
        full.arrive()
    else:
        full.wait(0)
        first = tile.sum(row[0:4])
        empty.arrive()
        full.wait(1)
        out[me] = first + tile.sum(row[0:4])


@ts.kernel
def one_writer_never_arrives(x, out):
    me = tile.local_id()
    row, full = tile.alloc_shared((8,), ts.f32), tile.mbarrier(4)
    tile.barrier()
    row[me] = x[me]
    if me < 4:
        full.arrive()
    full.wait(0)
    out[me] = row[7 - me]


@ts.kernel
def each_writer_arrives(x, out):
    me = tile.local_id()
    row, full = tile.alloc_shared((8,), ts.f32), tile.mbarrier(8)
    tile.barrier()
    row[me] = x[me]
    full.arrive()
    full.wait(0)
    out[me] = row[7 - me]


@ts.kernel
def waits_for_one_of_two(x, out):
    me = tile.local_id()
    row, low, high = tile.alloc_shared((8,), ts.f32), tile.mbarrier(4), tile.mbarrier(4)
    tile.barrier()
    row[me] = x[me]
    if me < 4:
        low.arrive()
    else:
        high.arrive()
    low.wait(0)
    out[me] = row[0] + row[7]


@ts.kernel
def waits_for_both(x, out):
    me = tile.local_id()
    row, low, high = tile.alloc_shared((8,), ts.f32), tile.mbarrier(4), tile.mbarrier(4)
    tile.barrier()
    row[me] = x[me]
    if me < 4:
        low.arrive()
    else:
        high.arrive()
    low.wait(0)
    high.wait(0)
    out[me] = row[0] + row[7]


@ts.kernel
def released_before_it_has_read(x, out):
    me = tile.local_id()
    row, full, empty = tile.alloc_shared((4,), ts.f32), tile.mbarrier(1), tile.mbarrier(7)
    tile.barrier()
    if me == 0:
        row[0:4] = x[0:4]
        full.arrive()
        empty.wait(0)
        row[0:4] = x[4:8]
    else:
        full.wait(0)
        empty.arrive()
        out[me] = tile.sum(row[0:4])


@ts.kernel
def released_when_it_has_read(x, out):
    me = tile.local_id()
    row, full, empty = tile.alloc_shared((4,), ts.f32), tile.mbarrier(1), tile.mbarrier(7)
    tile.barrier()
    if me == 0:
        row[0:4] = x[0:4]
        full.arrive()
        empty.wait(0)
        row[0:4] = x[4:8]
    else:
        full.wait(0)
        out[me] = tile.sum(row[0:4])
        empty.arrive()


NO_ORDER = "neither a barrier nor a phase of an mbarrier orders them"
PAIRS = {
    "wrong-stage": Pair(
        "M13", waits_for_the_other_stage, waits_for_its_stage, RaceError,
        ("reads it", "tile 0 writes it", NO_ORDER, "buffer[k, 0:4] = x"), 8,
    ),
    "wrong-phase": Pair(
        "M13", waits_for_the_first_phase_again, waits_for_each_phase, RaceError,
        ("reads it", "tile 0 writes it", NO_ORDER, "row[0:4] = x[4:8]"), 8,
    ),
    "missing-arrive": Pair(
        "M13", one_writer_never_arrives, each_writer_arrives, RaceError,
        ("tile 3 reads it", "tile 4 writes it", NO_ORDER), 8,
    ),
    "missing-wait": Pair(
        "M13", waits_for_one_of_two, waits_for_both, RaceError, ("reads it", "tile 7 writes it", NO_ORDER), 8,
    ),
    "reused-before-release": Pair(
        "M13", reused_before_release, in_turn, RaceError, ("reads it", "tile 0 writes it", NO_ORDER), 8,
    ),
    "arrived-before-writing": Pair(
        "M13", arrived_before_writing, in_turn, RaceError, ("reads it", "tile 0 writes it", NO_ORDER), 8,
    ),
    "released-before-reading": Pair(
        "M13", released_before_it_has_read, released_when_it_has_read, RaceError, ("tile 0 writes it", NO_ORDER), 8,
    ),
}  # fmt: skip
