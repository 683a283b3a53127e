"""Races between the programs of a grid, with atomics and without; each repaired."""

from __future__ import annotations

from typing import Any

import numpy as np

import tessera as ts
from conformance.tile.debug.pair import Pair
from tessera import tile
from tessera.core.errors import RaceError


def whole() -> dict[str, Any]:
    """Integers, whose sums are exact, and memory for one."""
    return {"x": np.arange(1, 9, dtype="i4"), "out": np.zeros(1, "i4")}


@ts.kernel
def counts(x, out):
    i = tile.program_id(0)
    out[i % 2] += 1.0


@ts.kernel
def counts_atomic(x, out):
    i = tile.program_id(0)
    tile.atomic_add(out[i % 2], 1.0)


@ts.kernel
def stencil_in_place(x, out):
    i = tile.program_id(0)
    if i > 0:
        if i < 7:
            x[i] = x[i - 1] + x[i + 1]


@ts.kernel
def stencil_apart(x, out):
    i = tile.program_id(0)
    if i > 0:
        if i < 7:
            out[i] = x[i - 1] + x[i + 1]


@ts.kernel
def two_to_one(x, out):
    i = tile.program_id(0)
    out[i // 2] = x[i]


@ts.kernel
def one_to_one(x, out):
    i = tile.program_id(0)
    if i % 2 == 0:
        out[i // 2] = x[i]


@ts.kernel
def split_sum(x, out):
    i = tile.program_id(0)
    out[0] += tile.cast(tile.sum(tile.load(x[i * 2 : i * 2 + 2])), ts.int32)


@ts.kernel
def split_sum_atomic(x, out):
    i = tile.program_id(0)
    tile.atomic_add(out[0], tile.cast(tile.sum(tile.load(x[i * 2 : i * 2 + 2])), ts.int32))


@ts.kernel
def reversed_in_place(x, out):
    i = tile.program_id(0)
    held = x[7 - i]
    x[i] = held


@ts.kernel
def reversed_by_halves(x, out):
    i = tile.program_id(0)
    if i < 4:
        low, high = x[i], x[7 - i]
        x[i] = high
        x[7 - i] = low


@ts.kernel
def wide_blocks(x, out):
    i = tile.program_id(0)
    tile.store(out[i * 2 : i * 2 + 4], tile.load(x[i * 2 : i * 2 + 4]) * (i + 1.0))


@ts.kernel
def fitting_blocks(x, out):
    i = tile.program_id(0)
    if i < 2:
        tile.store(out[i * 4 : i * 4 + 4], tile.load(x[i * 4 : i * 4 + 4]) * (i + 1.0))


@ts.kernel
def scattered_alike(x, out):
    i = tile.program_id(0)
    tile.store(out, tile.arange(0, 4) + i % 3, tile.full((4,), 1.0) * i)


@ts.kernel
def scattered_apart(x, out):
    i = tile.program_id(0)
    if i < 2:
        tile.store(out, tile.arange(0, 4) + i * 4, tile.full((4,), 1.0) * i)


@ts.kernel
def reset_beside_atomic(x, out):
    i = tile.program_id(0)
    if i == 0:
        out[0] = 0.0
    tile.atomic_add(out[0], x[i])


@ts.kernel
def reset_by_nobody(x, out):
    i = tile.program_id(0)
    tile.atomic_add(out[0], x[i])


@ts.kernel
def last_program_by_count(x, out):
    i = tile.program_id(0)
    out[i] = x[i]
    arrived = tile.atomic_add(out[7], 1.0)
    if arrived > 5.0:
        out[6] = out[0] + out[1]


@ts.kernel
def count_alone(x, out):
    i = tile.program_id(0)
    if i < 6:
        out[i] = x[i]
    tile.atomic_add(out[7], 1.0)


@ts.kernel
def lock(x, out):
    i = tile.program_id(0)
    before = tile.atomic_max(out[1], x[i])
    if before == 0.0:
        out[1] = 5.0


@ts.kernel
def no_lock(x, out):
    i = tile.program_id(0)
    tile.atomic_max(out[1], x[i])


@ts.kernel
def next_tile_of_the_group(x, out):
    me = tile.local_id()
    i = tile.program_id(0)
    out[(i * 4 + me + 1) % 8] = x[i * 4 + me] + out[i * 4 + me]


@ts.kernel
def own_tile_of_the_group(x, out):
    me = tile.local_id()
    i = tile.program_id(0)
    out[i * 4 + me] = x[i * 4 + me] + out[i * 4 + me]


PAIRS = {
    "counts": Pair("M5", counts, counts_atomic, RaceError, ("a data race on out[0]", "programs of a grid")),
    "stencil-in-place": Pair("M5", stencil_in_place, stencil_apart, RaceError, ("a data race on x[", "program")),
    "two-to-one": Pair("M6", two_to_one, one_to_one, RaceError, ("a data race on out[0]", "program (1,)")),
    "split-sum": Pair("M5", split_sum, split_sum_atomic, RaceError, ("out[0]",), None, (4,), whole),
    "reversed-in-place": Pair("M5", reversed_in_place, reversed_by_halves, RaceError, ("a data race on x[",)),
    "wide-blocks": Pair("M5", wide_blocks, fitting_blocks, RaceError, ("a data race on out[2]",), None, (3,)),
    "scattered-alike": Pair("M6", scattered_alike, scattered_apart, RaceError, ("a data race on out[",)),
    "across-groups": Pair("M5", next_tile_of_the_group, own_tile_of_the_group, RaceError, ("tile",), 4, (2,)),
    "reset-beside-atomic": Pair("M10", reset_beside_atomic, reset_by_nobody, RaceError, ("updates it", "writes it")),
    "last-program-by-count": Pair("M10", last_program_by_count, count_alone, RaceError, ("a data race on out[",)),
    "lock": Pair("M10", lock, no_lock, RaceError, ("updates it", "out[1]")),
}
