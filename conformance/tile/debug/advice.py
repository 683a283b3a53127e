"""Correct kernels that `lint` has advice for, by its kind, and the improved kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import tessera as ts
from tessera import tile


class Better(NamedTuple):
    """A kernel that gets advice of this kind, and one that gets none; both of (x, out)."""

    kind: str
    plain: Any
    better: Any
    says: tuple[str, ...]
    group: int | None = 32


def square() -> dict[str, Any]:
    """A square matrix of integers, and memory for another."""
    return {"x": np.arange(1024, dtype="f4").reshape(32, 32), "out": np.zeros((32, 32), "f4")}


@ts.kernel
def transposed(x, out):
    me = tile.local_id()
    rows = tile.alloc_shared((32, 32), ts.f32)
    for r in tile.range(0, 32):
        rows[r, me] = x[r, me]
    tile.barrier()
    for r in tile.range(0, 32):
        out[r, me] = rows[me, r]


@ts.kernel
def transposed_with_padding(x, out):
    me = tile.local_id()
    rows = tile.alloc_shared((32, 33), ts.f32)
    for r in tile.range(0, 32):
        rows[r, me] = x[r, me]
    tile.barrier()
    for r in tile.range(0, 32):
        out[r, me] = rows[me, r]


@ts.kernel
def every_other_word(x, out):
    me = tile.local_id()
    words = tile.alloc_shared((64,), ts.f32)
    words[2 * me] = x[0, me]
    tile.barrier()
    out[0, me] = words[2 * me]


@ts.kernel
def each_word(x, out):
    me = tile.local_id()
    words = tile.alloc_shared((64,), ts.f32)
    words[me] = x[0, me]
    tile.barrier()
    out[0, me] = words[me]


@ts.kernel
def down_the_columns(x, out):
    me = tile.local_id()
    for c in tile.range(0, 32):
        out[0, me] += x[me, c]


@ts.kernel
def along_the_rows(x, out):
    me = tile.local_id()
    for r in tile.range(0, 32):
        out[0, me] += x[r, me]


@ts.kernel
def column_of_a_block(x, out):
    tile.store(out[0:32, 0:1], tile.load(x[0:32, 0:1]))


@ts.kernel
def row_of_a_block(x, out):
    tile.store(out[0:1, 0:32], tile.load(x[0:1, 0:32]))


@ts.kernel
def greatest_of_what_is_not_there(x, out):
    out[0, 0] = tile.max(-tile.load(x[1, 0:32], mask=tile.arange(0, 32) < 20))


@ts.kernel
def greatest_of_what_is_there(x, out):
    out[0, 0] = tile.max(-tile.load(x[1, 0:32], mask=tile.arange(0, 32) < 20, other=float("inf")))


@ts.kernel
def sum_of_powers(x, out):
    here = tile.arange(0, 32) < 20
    out[0, 0] = tile.sum(tile.exp2(tile.load(x[0, 0:32], mask=here)))


@ts.kernel
def sum_of_powers_chosen(x, out):
    here = tile.arange(0, 32) < 20
    out[0, 0] = tile.sum(tile.where(here, tile.exp2(tile.load(x[0, 0:32], mask=here)), 0.0))


@ts.kernel
def stored_beyond_the_mask(x, out):
    tile.store(out[0, 0:32], tile.load(x[0, 0:32], mask=tile.arange(0, 32) < 20) + 1.0)


@ts.kernel
def stored_under_the_mask(x, out):
    here = tile.arange(0, 32) < 20
    tile.store(out[0, 0:32], tile.load(x[0, 0:32], mask=here) + 1.0, mask=here)


ADVICE = {
    "transposed": Better(
        "bank conflict",
        transposed,
        transposed_with_padding,
        ("up to 32", "1024 cycles for 32 warp accesses, at least 32 needed"),
    ),
    "every-other-word": Better(
        "bank conflict", every_other_word, each_word, ("up to 2 different", "2 cycles for 1 warp accesses")
    ),
    "down-the-columns": Better("uncoalesced", down_the_columns, along_the_rows, ("1024 sectors", "where 128")),
    "column-of-a-block": Better("uncoalesced", column_of_a_block, row_of_a_block, ("32 sectors", "where 4"), None),
    "greatest": Better(
        "outside mask", greatest_of_what_is_not_there, greatest_of_what_is_there, ("ts.max takes element (20,)",), None
    ),
    "sum-of-powers": Better("outside mask", sum_of_powers, sum_of_powers_chosen, ("ts.sum takes element (20,)",), None),
    "stored": Better(
        "outside mask", stored_beyond_the_mask, stored_under_the_mask, ("a store writes element (0, 20)",), None
    ),
}
