"""Small matrices in warps: solutions of systems (LU with partial pivoting) and Cholesky factors of a batch of them.

The rows of a matrix are in the lanes of a warp: each column is a block [together, side], whose elements at a row are a
shuffle. The columns that steps change are fewer in each of some stages, whose steps are a loop.
"""

from __future__ import annotations

from tessera.core.symbolic_dim import ceil_divide
from tessera.core.types import DType
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.tile_api import tile

# mypy: disable-error-code="operator, attr-defined, index"

STAGES = 4
WARP_ROWS = 32
COLUMN_REGISTERS = 128  # of 32 bits, for the columns of a matrix
VECTOR = 16  # bytes: of the rows that are moved at a time, and after a column in shared memory, for its banks
MOST_RIGHT = 8  # right sides of a program


def fits_warp(dtype: DType, side: int) -> bool:
    """Whether the lanes of a warp have the columns of a matrix in their registers."""
    return side * ceil_divide(side, WARP_ROWS) * (dtype.bits // 32) <= COLUMN_REGISTERS


def power_of_two(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def list_stages(count):
    """The first and the last step, and one more, of each stage."""
    length = ceil_divide(count, STAGES)
    return [(first, min(first + length, count)) for first in range(0, count, length)]


def count_rows(together, side):
    """The number of the row that each lane has of a column, in 32 bits."""
    return tile.broadcast(tile.reshape(tile.arange(0, side, "int32"), (1, side)), (together, side))


def find_existing(x, first, together):
    """Which of the matrices of a program there are, [together, 1]."""
    return tile.reshape(first + tile.arange(0, together) < x.shape[0], (together, 1))


def load_columns_of_rows(x, memory, first, column, step):
    """Columns of matrices from `column` on; 0 past their last row. Of so many rows at a time lanes read neighbours."""
    together, count, side = memory.shape
    last, end, starts = first + together, column + power_of_two(count), range(0, side, step)
    parts = [tile.load(x[first:last, r : r + step, column:end], edge="clip") for r in starts]
    for r, part in zip(starts, parts, strict=True):
        tile.store(memory[0:together, 0 : end - column, r : r + step], tile.transpose(part, 1, 2), edge="clip")
    return [tile.reshape(memory[0:together, j : j + 1, 0:side], (together, side)) for j in range(count)]


def store_columns_as_rows(x, memory, columns, first, column, step):
    """Write columns of matrices from `column` on: of so many rows at a time lanes write neighbours."""
    together, count, side = memory.shape
    last, end = first + together, column + power_of_two(count)
    for j in tile.static_range(count):
        memory[0:together, j, 0:side] = columns[j]
    for r in tile.range(0, x.shape[1], step):
        part = tile.load(memory[0:together, 0 : end - column, r : r + step], edge="clip")
        tile.store(x[first:last, r : r + step, column:end], tile.transpose(part, 1, 2), edge="clip")


def read_row(block, rows, row):
    """The element of each column of a block at a row, [together, 1]."""
    return tile.sum(tile.where(rows == tile.broadcast(row, block.shape), block, 0), axis=1, keepdims=True)


def choose_column(columns, first, k):
    """Column `k` of those of a list, which is column `first` and the following ones."""
    found = columns[0]
    for n in tile.static_range(1, len(columns)):
        found = tile.where(k == first + n, columns[n], found)
    return found


def rank_pivot(x):
    """What a pivot has most of: NaN is taken as one."""
    return tile.where(x != x, float("inf"), tile.abs(x))


def find_pivot(column, order, rows, k, count):
    """The row of the largest element of a column that is no pivot yet, and its place in the order, [together, 1]."""
    side = column.shape[1]
    size = tile.where((order >= k) & (rows < count), rank_pivot(column), -1.0)
    best = tile.broadcast(tile.max(size, axis=1, keepdims=True), column.shape)
    key = tile.where(size == best, order * side + rows, side * side)
    first = tile.min(key, axis=1, keepdims=True)
    return first % side, first // side


# Rows are not exchanged: `order` has the place of each row among the pivots, so that ties go to the row that exchanges
# would bring first, and `pivots` the row of each place.


@kernel
def solve_in_warps(a, b, out, *, together, side, width):
    """out[l] = the x with a[l] x = b[l], for a [L, N, N] and b [L, N, K].

    The grid is (ceil(L / together), ceil(K / width)); `side` is a power of two that holds N.
    """
    first, count = tile.program_id(0) * together, a.shape[1]
    right_first, shape = tile.program_id(1) * width, (together, side)
    rows, exists = count_rows(together, side), find_existing(a, first, together)
    vector = VECTOR // (a.dtype.bits // 8)
    memory = tile.alloc_shared((together, count, side), a.dtype, padding=vector)
    right_memory = tile.alloc_shared((together, width, side), a.dtype, padding=vector)
    columns = load_columns_of_rows(a, memory, first, 0, min(vector, side))
    right = load_columns_of_rows(b, right_memory, first, right_first, side)
    order, pivots, singular = rows, rows, tile.zeros((together, 1), "bool")
    for start, end in list_stages(count):
        rest = columns[start:]
        for number in tile.range(start, end, 1):
            k = tile.cast(number, "int32")
            column = choose_column(rest[: end - start], start, k)
            row, place = find_pivot(column, order, rows, k, count)
            pivot, chosen = read_row(column, rows, row), rows == tile.broadcast(row, shape)
            singular = singular | ((pivot == 0) & exists)
            order = tile.where(chosen, k, tile.where(order == k, tile.broadcast(place, shape), order))
            pivots = tile.where(rows == k, tile.broadcast(row, shape), pivots)
            factor, below = column / tile.broadcast(pivot, shape), order > k
            rest = [tile.where(below, x - factor * read_row(x, rows, row), x) for x in rest]
            right = [tile.where(below, x - factor * read_row(x, rows, row), x) for x in right]
        columns = columns[:start] + rest
    tile.assert_(~singular, "solve: a matrix is singular")
    found = right
    for start, end in list_stages(count)[::-1]:
        rest = columns[start:end]
        for number in tile.range(start, end, 1):
            k = tile.cast(start + end - 1 - number, "int32")
            column, row = choose_column(rest, start, k), read_row(pivots, rows, k)
            pivot = read_row(column, rows, row)
            solved = [read_row(x, rows, row) / pivot for x in right]
            right = [tile.where(order < k, x - column * y, x) for x, y in zip(right, solved, strict=True)]
            found = [tile.where(rows == k, tile.broadcast(y, shape), x) for x, y in zip(found, solved, strict=True)]
    store_columns_as_rows(out, right_memory, found, first, right_first, side)


@kernel
def factor_in_warps(a, out, *, together, side):
    """out[l] = the lower triangular factor of a[l] [N, N], of which the lower triangle is read.

    The grid is (ceil(L / together),); `side` is a power of two that holds N.
    """
    first, count, shape = tile.program_id(0) * together, a.shape[1], (together, side)
    rows, exists = count_rows(together, side), find_existing(a, first, together)
    vector = VECTOR // (a.dtype.bits // 8)
    memory = tile.alloc_shared((together, count, side), a.dtype, padding=vector)
    refused = tile.zeros((together, 1), "bool")
    columns = load_columns_of_rows(a, memory, first, 0, min(vector, side))
    for start, end in list_stages(count):
        rest = columns[start:]
        for number in tile.range(start, end, 1):
            k = tile.cast(number, "int32")
            column = choose_column(rest[: end - start], start, k)
            square = read_row(column, rows, k)
            refused = refused | (~(square > 0) & exists)
            root = tile.broadcast(tile.sqrt(square), shape)
            column = tile.where(rows == k, root, column / root)
            after = [x - column * read_row(column, rows, tile.cast(start + n, "int32")) for n, x in enumerate(rest)]
            own = [tile.where(k == start + n, column, x) for n, x in enumerate(rest[: end - start])]
            rest = [tile.where(k < start + n, after[n], x) for n, x in enumerate(own)] + after[end - start :]
        columns = columns[:start] + rest
    tile.assert_(~refused, "cholesky: a matrix is not positive definite")
    found = [tile.where(rows >= j, columns[j], 0.0) for j in range(count)]
    store_columns_as_rows(out, memory, found, first, 0, min(vector, side))
