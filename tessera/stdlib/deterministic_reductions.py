"""Deterministic reductions: a two-launch tree sum, and scatters that combine in index order, without atomics."""

import math
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import ArgumentError, Location, library_caller_location
from tessera.core.symbolic_dim import Dim, ceil_divide, symbol_names
from tessera.core.types import TensorType, as_dtype, int32, int64, uint16
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.frontend.kernel.trace import current_trace
from tessera.ir.core import Attrs
from tessera.ir.tensor import Tensor
from tessera.ops.api.creation import zeros
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.shape import check_index, gather
from tessera.ops.tensor.sorting import argsort
from tessera.stdlib.routine import check_array, compute, compute_dtype, routine

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
    per = ceil_divide(ceil_divide(count, block), MAX_PARTIAL_SUMS)
    partials = ceil_divide(count, per * block)
    partial = compute(kernel, (partials,), (partials,), state, flat, per=per)
    total = compute(kernel, (1,), (1,), state, partial, per=ceil_divide(MAX_PARTIAL_SUMS, block))
    return total.reshape(()).to(element if element.is_float else int64)


# Scatters of rows in the order of the indices: the same bits on every run.


MAX_BLOCK_COLS = 4096  # of rows that are updated in place: whole ones, as their places are anywhere in memory
ROW_PROGRAMS = 2  # that update rows of `WIDE_COLS` elements or more; each reads all places
WIDE_COLS = 256
SYMBOLIC_COLS = 1024  # of rows of a symbolic size


def combine_update(before, more, mode):
    """What an update makes of what is there; `mode` is "add" or one of `ts.scatter`."""
    if mode == "add":
        return before + more
    if mode == "multiply":
        return before * more
    if mode == "min":
        return tile.minimum(before, more)
    if mode == "max":
        return tile.maximum(before, more)
    return more


@kernel
def update_rows_in_place(memory, places, updates, *, rows: int, BC: int, mode, check):
    """memory[:, places[p]] is combined with updates[:, p] for each p in order, on the grid (L, ceil(R / BC),
    ceil(N / rows)): a program updates the places among its rows (owner computes), or all where `rows` is 0.

    `check(place)` is the place, checked.
    """
    lead, first, top = tile.program_id(0), tile.program_id(1) * BC, tile.program_id(2) * rows
    for p in tile.range(0, places.shape[0], 1):
        place = check(places[p])
        if rows == 0:
            _update_row(memory, updates, lead, place, p, first, BC, mode)
        elif (place >= top) & (place < top + rows):
            _update_row(memory, updates, lead, place, p, first, BC, mode)


def _update_row(memory, updates, lead, place, p, first, columns, mode):
    before = tile.load(memory[lead, place, first : first + columns], edge="clip")
    more = tile.load(updates[lead, p, first : first + columns], edge="clip")
    tile.store(memory[lead, place, first : first + columns], combine_update(before, more, mode), edge="clip")


@dataclass(frozen=True)
class PlaceCheck:
    """In a kernel, a place as a checked index, with the attributes and the line of a check of the whole tensor."""

    attrs: Attrs
    loc: Location

    def __call__(self, place: Any) -> Any:
        builder = current_trace("check_index").builder
        return Tensor(builder.add(check_index, [place.data], self.attrs, loc=self.loc).out)


def update_in_place(x: Any, places: Any, updates: Any, mode: str, check: PlaceCheck) -> Any:
    """`x` [L, N, R] whose rows at places [P] combine with updates [L, P, R], in the order of P, in x's own memory.

    A place is checked as it is read: a pass over the places of its own costs as much as the updates.
    """
    lead, count, width = x.shape
    block = SYMBOLIC_COLS if isinstance(width, Dim) else min(width, MAX_BLOCK_COLS)
    strips, rows = ceil_divide(width, block), 0
    if not symbol_names((count, width)) and width >= WIDE_COLS:
        rows = ceil_divide(count, ceil_divide(ROW_PROGRAMS, strips))
    grid = (lead, strips, ceil_divide(count, rows) if 0 < rows < count else 1)
    rows = rows if rows < count else 0
    return launch(update_rows_in_place, grid, x, places, updates, rows=rows, BC=block, mode=mode, check=check)


# The same with many programs: the updates are sorted by their place, so that each row finds its own side by side.


NARROW_COLS = 64  # rows of fewer elements share a program
SEGMENT_ELEMENTS = 1024  # of the block of a program
# Updates of a step, whose loads do not wait for each other: of a row, and of rows that share a program, most with few.
AHEAD, FEW_AHEAD = 8, 2


@kernel
def find_segments(places, starts, *, block):
    """starts[n] = how many of the sorted `places` are below n, for the blocks of n of the grid, by binary search."""
    row, last = tile.program_id(0) * block + tile.arange(0, block), places.shape[0] - 1
    low, high = tile.zeros((block,), "int64"), tile.full((block,), last + 1, "int64")
    for _ in tile.range(0, (last + 1).bit_length(), 1):
        middle = (low + high) // 2
        below = (places[tile.minimum(middle, last)] < row) & (low < high)
        low, high = tile.where(below, middle + 1, low), tile.where(below | (low >= high), high, middle)
    tile.store(starts[tile.program_id(0) * block : tile.program_id(0) * block + block], low, edge="clip")


def combine_segment(total, updates, order, begin, end, lead, first, mode):
    """A part of a row combined with the updates from `begin` to before `end` of an order, one after the other."""
    last = end - (end - begin) % AHEAD
    for p in tile.range(begin, last, AHEAD):
        for i in tile.static_range(AHEAD):
            more = tile.load(updates[lead, order[p + i], first : first + total.shape[0]], edge="clip")
            total = combine_update(total, tile.cast(more, total.dtype), mode)
    for p in tile.range(last, end, 1):
        more = tile.load(updates[lead, order[p], first : first + total.shape[0]], edge="clip")
        total = combine_update(total, tile.cast(more, total.dtype), mode)
    return total


@kernel
def combine_segments(x, order, starts, updates, out, *, state, cols, mode):
    """out[l, n] = x[l, n] and then the updates[l, order[p]] for each p of row n's segment, one after the other.

    The grid is (L, N, ceil(R / cols)); sums and products have the type `state`.
    """
    lead, row, first = tile.program_id(0), tile.program_id(1), tile.program_id(2) * cols
    total = tile.cast(tile.load(x[lead, row, first : first + cols], edge="clip"), state)
    total = combine_segment(total, updates, order, starts[row], starts[row + 1], lead, first, mode)
    tile.store(out[lead, row, first : first + cols], tile.cast(total, out.dtype), edge="clip")


@kernel
def combine_narrow_segments(x, order, starts, updates, out, *, state, rows, cols, mode):
    """As `combine_segments` for `rows` rows of up to `cols` elements together, on the grid (L, ceil(N / rows))."""
    lead, top = tile.program_id(0), tile.program_id(1) * rows
    row, last = tile.minimum(top + tile.arange(0, rows), x.shape[1] - 1), order.shape[0] - 1
    begin, end = starts[row], starts[row + 1]
    column = tile.broadcast(tile.reshape(tile.minimum(tile.arange(0, cols), x.shape[2] - 1), (1, cols)), (rows, cols))
    total = tile.cast(tile.load(x[lead, top : top + rows, 0:cols], edge="clip"), state)
    for first in tile.range(0, tile.max(end - begin), FEW_AHEAD):
        for i in tile.static_range(FEW_AHEAD):
            number = begin + first + i
            inside = tile.broadcast(tile.reshape(number < end, (rows, 1)), (rows, cols))
            place = tile.broadcast(tile.reshape(order[tile.minimum(number, last)], (rows, 1)), (rows, cols))
            more = tile.cast(updates[lead, place, column], state)
            total = tile.where(inside, combine_update(total, more, mode), total)
    tile.store(out[lead, top : top + rows, 0:cols], tile.cast(total, out.dtype), edge="clip")


@kernel
def combine_few_segments(memory, order, places, updates, *, state, cols, mode):
    """memory[l, n] is combined with the updates[l, order[p]] for each p of row n's segment, on the grid (L, P,
    ceil(R / cols)): of the sorted `places` the program of a segment's first one walks it, and the others end."""
    lead, p, first = tile.program_id(0), tile.program_id(1), tile.program_id(2) * cols
    row, last = places[p], places.shape[0] - 1
    if (p == 0) | (places[tile.maximum(p - 1, 0)] != row):
        low, high = p + 1, last + 1
        for _ in tile.range(0, (last + 1).bit_length(), 1):
            middle = (low + high) // 2
            inside = (low < high) & (places[tile.minimum(middle, last)] == row)
            low, high = tile.where(inside, middle + 1, low), tile.where(inside | (low >= high), high, middle)
        total = tile.cast(tile.load(memory[lead, row, first : first + cols], edge="clip"), state)
        total = combine_segment(total, updates, order, p, low, lead, first, mode)
        tile.store(memory[lead, row, first : first + cols], tile.cast(total, memory.dtype), edge="clip")


def find_same_places(places, row, size, block):
    """Which of at most `block` places, where negative ones count from the end of `size` rows, name a row."""
    others = tile.load(places[0:block], edge="clip")
    return (tile.where(others < 0, others + size, others) == row) & (tile.arange(0, block) < places.shape[0])


@kernel
def replace_unsorted(memory, places, updates, *, block, cols, check):
    """memory[l, places[p]] = updates[l, p] for the last p of each row, on the grid (L, P, ceil(R / cols)).

    The programs of other updates end. There are at most `block` places.
    """
    lead, p, first = tile.program_id(0), tile.program_id(1), tile.program_id(2) * cols
    row, number = check(places[p]), tile.arange(0, block)
    same = find_same_places(places, row, memory.shape[1], block)
    if tile.sum(tile.cast(same & (number > p), "int32")) == 0:
        new = tile.load(updates[lead, p, first : first + cols], edge="clip")
        tile.store(memory[lead, row, first : first + cols], new, edge="clip")


REPEATED = 8  # updates of a row beyond the first, up to which each is looked for among all


@kernel
def combine_unsorted(memory, places, updates, *, state, block, cols, check):
    """memory[l, places[p]] plus the updates[l, p] in order, on the grid (L, P, ceil(R / cols)).

    The program of the first update of a row adds all of them, and the others end. There are at most `block` places.
    """
    lead, p, first = tile.program_id(0), tile.program_id(1), tile.program_id(2) * cols
    row, number = check(places[p]), tile.arange(0, block)
    same, size = find_same_places(places, row, memory.shape[1], block), memory.shape[1]
    if tile.sum(tile.cast(same & (number < p), "int32")) == 0:
        later = tile.sum(tile.cast(same & (number > p), "int32"))
        total = tile.cast(tile.load(memory[lead, row, first : first + cols], edge="clip"), state)
        total, at = total + tile.cast(tile.load(updates[lead, p, first : first + cols], edge="clip"), state), p
        if later <= REPEATED:
            for _ in tile.range(0, tile.cast(later, "int64"), 1):
                at = tile.min(tile.where(same & (number > at), number, block - 1))
                total += tile.cast(tile.load(updates[lead, at, first : first + cols], edge="clip"), state)
        else:
            for q in tile.range(p + 1, places.shape[0], 1):
                if (places[q] == row) | (places[q] + size == row):
                    total += tile.cast(tile.load(updates[lead, q, first : first + cols], edge="clip"), state)
        tile.store(memory[lead, row, first : first + cols], tile.cast(total, memory.dtype), edge="clip")


FEW_PLACES = 4  # rows for each update, from which on rows without updates are most of the work
MOST_UNSORTED = 512  # updates that take less time than a sort
MOST_SHORT = 1 << 16  # rows whose numbers have 16 bits


def is_unsorted(sizes: tuple[int, ...], updates: int) -> bool:
    """Whether `update_unsorted` is for so many updates of an operand [L, N, R]: few, of long rows, most without any."""
    return updates <= MOST_UNSORTED and updates * FEW_PLACES <= sizes[1] and sizes[2] >= NARROW_COLS


def update_unsorted(x: Any, places: Any, updates: Any, mode: str, check: PlaceCheck) -> Any:
    """`x` [L, N, R] whose rows at places [P] are added to, or set to, updates [L, P, R], in the order of P, in x's own
    memory."""
    lead, _, width = (int(n) for n in x.shape)
    many, cols = int(places.shape[0]), min(1 << (width - 1).bit_length(), SEGMENT_ELEMENTS)
    grid = (lead, many, ceil_divide(width, cols))
    how = {"block": 1 << (many - 1).bit_length(), "cols": cols, "check": check}
    if mode == "set":
        return launch(replace_unsorted, grid, x, places, updates, **how)
    state = compute_dtype(x.dtype) if x.dtype.is_float else x.dtype
    return launch(combine_unsorted, grid, x, places, updates, **how, state=state)


def combine_sorted(x: Any, places: Any, updates: Any, mode: str) -> Any:
    """`x` [L, N, R] whose rows at places [P], from 0 to N - 1, combine with updates [L, P, R], in the order of P.

    A stable sort of the places, a binary search of each row's segment, and one sum or product a row: the same bits on
    every run.
    """
    lead, count, width = (int(n) for n in x.shape)
    order = argsort(
        cast(places, dtype=uint16 if count <= MOST_SHORT else int32), axis=0
    )  # a sort by digits: half of them
    ordered = gather(places, order, axis=0)
    state, cols = compute_dtype(x.dtype) if x.dtype.is_float else x.dtype, 1 << (width - 1).bit_length()
    many = int(places.shape[0])
    if many * FEW_PLACES <= count and cols >= NARROW_COLS:
        cols = min(cols, SEGMENT_ELEMENTS)
        grid: tuple[int, ...] = (lead, many, ceil_divide(width, cols))
        return launch(combine_few_segments, grid, x, order, ordered, updates, state=state, cols=cols, mode=mode)
    block = min(SEGMENT_ELEMENTS, 1 << count.bit_length())
    segments = OutputMemory(TensorType((count + 1,), int64))
    starts = launch(find_segments, (ceil_divide(count + 1, block),), ordered, segments, block=block)
    memory = OutputMemory(TensorType((lead, count, width), x.dtype))
    if cols < NARROW_COLS:
        rows = min(SEGMENT_ELEMENTS // cols, 1 << (count - 1).bit_length())
        grid = (lead, ceil_divide(count, rows))
        options = {"state": state, "rows": rows, "cols": cols, "mode": mode}
        return launch(combine_narrow_segments, grid, x, order, starts, updates, memory, **options)
    cols = min(cols, SEGMENT_ELEMENTS)
    grid = (lead, count, ceil_divide(width, cols))
    return launch(combine_segments, grid, x, order, starts, updates, memory, state=state, cols=cols, mode=mode)
