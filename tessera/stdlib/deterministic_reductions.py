"""Deterministic reductions: a two-launch tree sum and a scatter-add in index order, without atomics."""

import math
from collections.abc import Mapping
from typing import Any

from tessera.core.errors import ArgumentError, library_caller_location
from tessera.core.types import Type, as_dtype, int64
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Module
from tessera.ops.api.creation import zeros
from tessera.stdlib.routine import ceil_div, check_array, compute, compute_dtype, routine

# The sum of a long vector over a whole grid, in two launches and without atomics: the same bits every time.


# mypy: disable-error-code="operator, attr-defined, index"


# The most partial sums of the first launch that the second launch adds.
MAX_PARTIAL_SUMS = 256


@kernel
def sum_blocks(x, out, *, per: int, BLOCK: int = 4096):
    """out[p] = the sum of the per · BLOCK elements of x from p · per · BLOCK on, for the programs p of the grid.

    Each lane adds its elements in order; then a tree adds the lanes. BLOCK is a power of two.
    """
    first = tile.program_id(0) * (per * BLOCK)
    lanes = tile.zeros((BLOCK,), out.dtype)
    for start in tile.range(first, first + per * BLOCK, BLOCK):
        lanes += tile.cast(tile.load(x[start : start + BLOCK], edge="clip"), out.dtype)
    out[tile.program_id(0)] = sum_by_tree(lanes, BLOCK)


def sum_by_tree(lanes, size):
    """The sum of a block by a binary tree: element i plus element i + size / 2, repeatedly."""
    while size > 1:
        size = size // 2
        lanes = tile.sum(tile.reshape(lanes, (2, size)), axis=0)
    return tile.reshape(lanes, ())


@routine(sum_blocks)
def tree_sum(kernel: Any, x: Any) -> Any:
    """The sum of all elements of `x`, of a float or integer type, by a tree that depends only on the size and BLOCK.

    Floats of 16 bits and f32 are added in f32, f64 in f64, and the result is rounded once to the type of `x`;
    integers give int64. Every target and every run gives the same bits.

    Raises:
        ArgumentError: the schedule's block is not a power of two.
        DTypeError: the elements are not numbers.

    >>> int(tree_sum(range(100_000)))
    4999950000
    """
    held = check_array(x, "x", "fi")
    flat, element = held.reshape(math.prod(held.shape)), as_dtype(held.dtype)
    state = compute_dtype(element) if element.is_float else int64
    block = kernel.bind((flat, flat), {"per": 1}).constants["BLOCK"]
    if block & (block - 1):
        raise ArgumentError(
            f"BLOCK={block} cannot be halved to one", location=library_caller_location(), expected="a power of two"
        )
    count = flat.shape[0]
    if not count:
        return zeros((), dtype=element if element.is_float else int64)
    per = max(ceil_div(ceil_div(count, block), MAX_PARTIAL_SUMS), 1)
    partials = ceil_div(count, per * block)
    partial = compute(kernel, (partials,), (partials,), state, flat, per=per)
    total = compute(kernel, (1,), (1,), state, partial, per=max(ceil_div(partials, block), 1))
    return total.reshape(()).to(element if element.is_float else int64)


# Scatter-add of rows in the order of the indices: the same bits on every run.


BLOCK_ROWS, BLOCK_COLS = 64, 64


@kernel
def add_rows(x, places, updates, out, *, BR: int = BLOCK_ROWS, BC: int = BLOCK_COLS):
    """out = x, and then out[:, places[p]] += updates[:, p] for each p, on the grid (L, ceil(R / BC)).

    x and out are [L, N, R], updates [L, P, R], places [P] integers from 0 to N - 1. A program owns a
    block of columns: no two programs write one element.
    """
    lead, first = tile.program_id(0), tile.program_id(1) * BC
    for start in tile.range(0, x.shape[1], BR):
        block = tile.load(x[lead, start : start + BR, first : first + BC], edge="clip")
        tile.store(out[lead, start : start + BR, first : first + BC], block, edge="clip")
    for p in tile.range(0, places.shape[0], 1):
        place = places[p]
        before = tile.load(out[lead, place, first : first + BC], edge="clip")
        more = tile.load(updates[lead, p, first : first + BC], edge="clip")
        tile.store(out[lead, place, first : first + BC], before + more, edge="clip")


def specialise_scatter(types: Mapping[str, Type]) -> Module:
    """The Tile module for refs x, places, updates and out."""
    lead, rows, columns = (int(n) for n in types["x"].shape)  # type: ignore[arg-type]
    blocks = {"BR": min(BLOCK_ROWS, rows), "BC": min(BLOCK_COLS, columns)}
    return add_rows.specialize(types, blocks, (lead, -(-columns // blocks["BC"])))
