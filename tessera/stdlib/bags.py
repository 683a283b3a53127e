"""Bags of rows: the sum or mean of the rows of a table that each bag of indices names, in the kernel language.

The indices of a bag are a range of the list, so that a program walks its own bag, a few rows at a time; no index needs
the number of its bag.
"""

from __future__ import annotations

from typing import Any

from tessera.core.errors import trace_location
from tessera.core.symbolic_dim import ceil_divide
from tessera.core.types import TensorType
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.core import Attrs
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import splat
from tessera.ops.tensor.shape import check_index
from tessera.stdlib.deterministic_reductions import PlaceCheck
from tessera.stdlib.routine import compute_dtype

# mypy: disable-error-code="operator, attr-defined, index"

MAX_COLS = 512  # of a program
BLOCK, FEWEST_ROWS, MOST_ROWS = 1024, 4, 16  # elements and rows that a program loads at a time


@kernel
def add_bag(table, indices, offsets, weights, out, *, state, rows, cols, mean, padding, check):
    """out[b] = the sum or mean of the rows table[i] for the indices i of bag b, on the grid (B, ceil(D / cols)).

    Bag b has the indices from offsets[b] to before offsets[b + 1], the last one maybe those to the end. `weights` scale
    the rows where they are given; the index `padding` counts as nothing. `check(index)` is an index, checked.
    """
    bag, column = tile.program_id(0), tile.program_id(1) * cols + tile.arange(0, cols)
    count, last = indices.shape[0], offsets.shape[0] - 1
    begin = tile.cast(offsets[bag], "int64")
    end = tile.where(bag < last, tile.cast(offsets[tile.minimum(bag + 1, last)], "int64"), count)
    total, used = tile.zeros((rows, cols), state), tile.zeros((rows,), "int32")
    for at in tile.range(begin, end, rows):
        number = at + tile.arange(0, rows)
        inside = number < end
        index = check(tile.load(indices[number], mask=inside))
        inside = inside & (index != padding)
        there = tile.broadcast(tile.reshape(inside, (rows, 1)), (rows, cols))
        if table.shape[1] % cols:
            there = there & tile.reshape(column < table.shape[1], (1, cols))
        found = tile.load(table[tile.reshape(index, (rows, 1)), tile.reshape(column, (1, cols))], mask=there)
        found = tile.cast(found, state)
        if weights is not None:
            weight = tile.cast(tile.load(weights[number], mask=inside), state)
            found = found * tile.reshape(weight, (rows, 1))
        total = total + found
        used = used + tile.cast(inside, "int32")
    whole = tile.sum(total, axis=0)
    if mean:
        whole = whole / tile.cast(tile.maximum(tile.sum(used), 1), state)
    start = tile.program_id(1) * cols
    tile.store(out[bag, start : start + cols], tile.cast(whole, out.dtype), edge="clip")


def add_bags(
    table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None, bags: Any, mean: bool, padding: int
) -> Tensor:
    """The sum or mean of the rows of `table` [V, D] in each of so many bags of `indices` [N]: [bags, D].

    Bag b begins at offsets[b]; the last one ends where the next would begin, if `offsets` say so, or with the indices.
    Sums are of the type that sums of the elements have, and are rounded once.

    Raises:
        OutOfBoundsError: an index is outside the table, or an offset outside the indices.
    """
    width, type = table.shape[1], TensorType((bags, table.shape[1]), table.dtype)
    if 0 in (*type.shape, indices.shape[0]):
        return splat(0, type)
    strips = ceil_divide(int(width), MAX_COLS)
    cols = MAX_COLS if width % strips else int(width) // strips  # even strips need no mask
    rows = max(FEWEST_ROWS, min(MOST_ROWS, BLOCK >> (cols - 1).bit_length()))
    builder = CURRENT_BUILDER.get()
    location = (builder.location if builder is not None else None) or trace_location()
    attrs = {"size": table.shape[0], "along": 0, "what": "index", "wrap": False}
    check = PlaceCheck(Attrs(check_index.complete(attrs)), location)
    starts = check_index(offsets, size=indices.shape[0] + 1, wrap=False)
    options = {"state": compute_dtype(table.dtype), "rows": rows, "cols": cols, "mean": mean, "padding": padding}
    grid = (bags, ceil_divide(width, cols))
    return launch(add_bag, grid, table, indices, starts, weights, OutputMemory(type), **options, check=check)  # type: ignore[no-any-return]
