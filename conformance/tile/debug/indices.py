"""Wrong indices, and their repairs: out of bounds, read from data, overflowing their type, misaligned vectors."""

from __future__ import annotations

from typing import Any

import numpy as np

import tessera as ts
from conformance.tile.debug.pair import Pair
from tessera import tile
from tessera.core.errors import AlignmentError, IndexOverflowError, OutOfBoundsError


def matrix() -> dict[str, Any]:
    """A matrix of 2 rows and 4 columns, and memory for its transpose."""
    return {"x": np.arange(8, dtype="f4").reshape(2, 4), "out": np.zeros((4, 2), "f4")}


def rows_of_six() -> dict[str, Any]:
    """Rows whose length is not a multiple of four."""
    return {"x": np.arange(24, dtype="f4").reshape(4, 6), "out": np.zeros((4, 4), "f4")}


@ts.kernel
def one_column_too_many(x, out):
    i = tile.program_id(0)
    for j in tile.range(0, 5):
        out[j, i] = x[i, j]


@ts.kernel
def all_columns(x, out):
    i = tile.program_id(0)
    for j in tile.range(0, 4):
        out[j, i] = x[i, j]


@ts.kernel
def swapped_axes(x, out):
    i = tile.program_id(0)
    for j in tile.range(0, 4):
        out[i, j] = x[i, j]


@ts.kernel
def by_value(x, out):
    i = tile.program_id(0)
    out[i] = x[tile.cast(x[i], ts.int64)]


@ts.kernel
def by_value_less_one(x, out):
    i = tile.program_id(0)
    out[i] = x[tile.cast(x[i], ts.int64) - 1]


@ts.kernel
def scattered_by_value(x, out):
    places = tile.cast(tile.load(x[0:8]), ts.int64)
    tile.store(out, places, tile.load(x[0:8]))


@ts.kernel
def scattered_by_value_less_one(x, out):
    places = tile.cast(tile.load(x[0:8]), ts.int64) - 1
    tile.store(out, places, tile.load(x[0:8]))


@ts.kernel
def atomic_outside(x, out):
    tile.atomic_add(out[tile.program_id(0) * 2], 1.0)


@ts.kernel
def atomic_inside(x, out):
    tile.atomic_add(out[tile.program_id(0) * 2 % 8], 1.0)


@ts.kernel
def loose_mask(x, out):
    places = tile.arange(0, 16)
    tile.store(out, places, tile.load(x, places, mask=places <= 8), mask=places < 8)


@ts.kernel
def tight_mask(x, out):
    places = tile.arange(0, 16)
    tile.store(out, places, tile.load(x, places, mask=places < 8, other=0.0), mask=places < 8)


@ts.kernel
def runs_past_the_end(x, out):
    i = tile.program_id(0)
    total = 0.0
    while total < 100.0:
        total += x[i]
        i += 1
    out[0] = total


@ts.kernel
def ends_at_the_end(x, out):
    i = tile.program_id(0)
    total = 0.0
    while i < 8:
        total += x[i]
        i += 1
    out[tile.program_id(0)] = total


@ts.kernel
def register_outside(x, out):
    i = tile.program_id(0)
    held = tile.alloc_register((4,), ts.f32)
    for j in tile.range(0, 4):
        held[j] = x[i] * j
    out[i] = held[i]


@ts.kernel
def register_inside(x, out):
    i = tile.program_id(0)
    held = tile.alloc_register((4,), ts.f32)
    for j in tile.range(0, 4):
        held[j] = x[i] * j
    out[i] = held[i % 4]


@ts.kernel
def copied_past_the_end(x, out):
    i = tile.program_id(0)
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:8], x[i : i + 8])
    tile.cp_wait_group(0)
    out[i] = row[7]


@ts.kernel
def copied_and_clipped(x, out):
    i = tile.program_id(0)
    row = tile.alloc_shared((8,), ts.f32)
    tile.cp_async(row[0:8], x[i : i + 8], edge="clip")
    tile.cp_wait_group(0)
    out[i] = row[7]


@ts.kernel
def product_in_int32(x, out):
    i = tile.cast(tile.program_id(0), ts.int32)
    out[tile.program_id(0)] = x[(i * 1000000000) // 1000000000]


@ts.kernel
def product_in_int64(x, out):
    i = tile.program_id(0)
    out[i] = x[(i * 1000000000) // 1000000000]


@ts.kernel
def narrowed_index(x, out):
    i = tile.program_id(0)
    out[i] = x[tile.cast(i * 100, ts.int8) // 100]


@ts.kernel
def wide_index(x, out):
    i = tile.program_id(0)
    out[i] = x[i * 100 // 100]


@ts.kernel
def shifted_too_far(x, out):
    i = tile.program_id(0)
    out[i] = x[((i + 1) << 61) // (1 << 61) - 1]


@ts.kernel
def shifted_a_little(x, out):
    i = tile.program_id(0)
    out[i] = x[((i + 1) << 2) // 4 - 1]


@ts.kernel
def sum_in_int8(x, out):
    steps = tile.cast(tile.arange(0, 8) * 16, ts.int8)
    tile.store(out[0:8], tile.load(x, tile.cast(steps + steps, ts.int64) // 32))


@ts.kernel
def sum_in_int64(x, out):
    steps = tile.arange(0, 8) * 16
    tile.store(out[0:8], tile.load(x, (steps + steps) // 32))


@ts.kernel
def vector_at_any_place(x, out):
    i = tile.program_id(0)
    tile.store(out[4 * i : 4 * i + 4], tile.load_vector(x[i : i + 4], 4))


@ts.kernel
def vector_at_its_place(x, out):
    i = tile.program_id(0)
    tile.store(out[4 * i : 4 * i + 4], tile.load_vector(x[4 * i : 4 * i + 4], 4))


@ts.kernel
def vector_of_a_short_row(x, out):
    i = tile.program_id(0)
    tile.store(out[i, 0:4], tile.load_vector(x[i], 4))


@ts.kernel
def pair_of_a_short_row(x, out):
    i = tile.program_id(0)
    tile.store(out[i, 0:2], tile.load_vector(x[i], 2))


@ts.kernel
def stored_at_three(x, out):
    me = tile.local_id()
    if me < 2:
        tile.store_vector(out[me * 3 : me * 3 + 2], tile.load(x[me * 2 : me * 2 + 2]))


@ts.kernel
def stored_at_four(x, out):
    me = tile.local_id()
    if me < 2:
        tile.store_vector(out[me * 4 : me * 4 + 2], tile.load(x[me * 2 : me * 2 + 2]))


PAIRS = {
    "one-column-too-many": Pair(
        "M1",
        one_column_too_many,
        all_columns,
        OutOfBoundsError,
        ("index 4 is outside axis 1 of x",),
        None,
        (2,),
        matrix,
    ),
    "swapped-axes": Pair(
        "M1", swapped_axes, all_columns, OutOfBoundsError, ("is outside axis 1 of out", "program"), None, (2,), matrix
    ),
    "index-from-data": Pair("M1", by_value, by_value_less_one, OutOfBoundsError, ("index 8", "program (7,)")),
    "scatter-from-data": Pair(
        "M1", scattered_by_value, scattered_by_value_less_one, OutOfBoundsError, ("index 8", "element (7,)"), None, (1,)
    ),
    "atomic-outside": Pair("M1", atomic_outside, atomic_inside, OutOfBoundsError, ("index 8", "program (4,)")),
    "loose-mask": Pair("M1", loose_mask, tight_mask, OutOfBoundsError, ("index 8", "element (8,)"), None, (1,)),
    "endless-search": Pair("M1", runs_past_the_end, ends_at_the_end, OutOfBoundsError, ("index 8", "x[i]"), None, (1,)),
    "register-outside": Pair("M1", register_outside, register_inside, OutOfBoundsError, ("index 4", "program (4,)")),
    "copy-outside": Pair("M1", copied_past_the_end, copied_and_clipped, OutOfBoundsError, ("index 8", "cp_async")),
    "int32-product": Pair(
        "M1",
        product_in_int32,
        product_in_int64,
        IndexOverflowError,
        ("does not fit int32", "3 * 1000000000", "program (3,)"),
    ),
    "narrowed": Pair(
        "M1", narrowed_index, wide_index, IndexOverflowError, ("does not fit int8", "200", "program (2,)")
    ),
    "shifted-too-far": Pair(
        "M1", shifted_too_far, shifted_a_little, IndexOverflowError, ("does not fit int64", "4 << 61", "program (3,)")
    ),
    "int8-sum": Pair("M1", sum_in_int8, sum_in_int64, IndexOverflowError, ("64 + 64", "element (4,)"), None, (1,)),
    "vector-anywhere": Pair(
        "M11",
        vector_at_any_place,
        vector_at_its_place,
        AlignmentError,
        ("begins at element 1 of x", "program (1,)"),
        None,
        (2,),
    ),
    "vector-of-a-short-row": Pair(
        "M11", vector_of_a_short_row, pair_of_a_short_row, AlignmentError, ("element 6 of x",), None, (4,), rows_of_six
    ),
    "vector-stored-off": Pair(
        "M11", stored_at_three, stored_at_four, AlignmentError, ("element 3 of out", "tile 1"), 8
    ),
}
