"""Small matrices: solutions of systems (LU with partial pivoting), Cholesky and QR factors of a batch of them.

A program in the kernel language has a matrix in the lanes of a warp (`warp_matrices.py`). What does not fit there, it
holds as one block, whose rows and columns it reads by masked sums.
"""

from __future__ import annotations

import math
from typing import Any

from tessera.core.symbolic_dim import ceil_divide
from tessera.core.types import DType, TensorType, f32, f64
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.shape import reshape
from tessera.stdlib.warp_matrices import (
    MOST_RIGHT,
    WARP_ROWS,
    factor_in_warps,
    fits_warp,
    power_of_two,
    rank_pivot,
    solve_in_warps,
)

# mypy: disable-error-code="operator, attr-defined, index"

MAX_SIDE = 64  # rows and columns of a matrix
BLOCK = 512  # elements of the matrices of a program


def number_rows(size):
    """The numbers of the rows of a block of matrices [B, size, 1]."""
    return tile.reshape(tile.arange(0, size), (1, size, 1))


def number_columns(size):
    """The numbers of the columns of a block of matrices [B, 1, size]."""
    return tile.reshape(tile.arange(0, size), (1, 1, size))


def pick(block, where, axis):
    """What a block holds where a mask has one element along an axis, which is kept with size 1."""
    mask = tile.broadcast(where, block.shape)
    return tile.sum(tile.where(mask, block, 0), axis=axis, keepdims=True)


def replace(block, where, new):
    """A block with other elements where a mask holds; mask and elements are broadcast."""
    return tile.where(tile.broadcast(where, block.shape), tile.broadcast(new, block.shape), block)


@kernel
def solve_systems(a, b, out, *, together, side, width):
    """out[l] = the x with a[l] x = b[l], for a [L, N, N] and b [L, N, K], on the grid (ceil(L / together),).

    `side` and `width` are powers of two that hold N and K.
    """
    first, count = tile.program_id(0) * together, a.shape[1]
    matrix = tile.load(a[first : first + together, 0:side, 0:side], edge="clip")
    right = tile.load(b[first : first + together, 0:side, 0:width], edge="clip")
    rows, columns, narrow = number_rows(side), number_columns(side), (together, side, 1)
    exists = tile.reshape(first + tile.arange(0, together) < a.shape[0], (together, 1, 1))
    for k in tile.range(0, count, 1):
        column = pick(matrix, columns == k, 2)
        size = tile.where(column != column, float("inf"), tile.abs(column))  # NaN is taken as a pivot
        left = tile.broadcast((rows >= k) & (rows < count), narrow)
        size = tile.where(left, size, -1.0)
        best = tile.broadcast(tile.max(size, axis=1, keepdims=True), narrow)
        number = tile.broadcast(rows, narrow)
        chosen = tile.min(tile.where(size == best, number, side), axis=1, keepdims=True)
        is_chosen = number == tile.broadcast(chosen, narrow)
        pivot_row, pivot_right = pick(matrix, is_chosen, 1), pick(right, is_chosen, 1)
        pivot = pick(column, is_chosen, 1)
        tile.assert_((pivot != 0) | ~exists, "solve: a matrix is singular")
        other = pick(column, rows == k, 1)
        matrix = replace(matrix, is_chosen, pick(matrix, rows == k, 1))
        right = replace(right, is_chosen, pick(right, rows == k, 1))
        column = replace(column, is_chosen, other)
        matrix, right = replace(matrix, rows == k, pivot_row), replace(right, rows == k, pivot_right)
        factor = tile.where(tile.broadcast(rows > k, narrow), column / tile.broadcast(pivot, narrow), 0.0)
        matrix = matrix - tile.broadcast(factor, matrix.shape) * tile.broadcast(pivot_row, matrix.shape)
        right = right - tile.broadcast(factor, right.shape) * tile.broadcast(pivot_right, right.shape)
    for i in tile.range(0, count, 1):
        k = count - 1 - i
        column, found = pick(matrix, columns == k, 2), pick(right, rows == k, 1)
        found = found / tile.broadcast(pick(column, rows == k, 1), found.shape)
        factor = tile.where(tile.broadcast(rows < k, narrow), column, 0.0)
        right = right - tile.broadcast(factor, right.shape) * tile.broadcast(found, right.shape)
        right = replace(right, rows == k, found)
    tile.store(out[first : first + together, 0:side, 0:width], right, edge="clip")


@kernel
def factor_symmetric(a, out, *, together, side):
    """out[l] = the lower triangular factor of a[l] [N, N], of which the lower triangle is read.

    The grid is (ceil(L / together),); `side` is a power of two that holds N.
    """
    first, count = tile.program_id(0) * together, a.shape[1]
    rows, columns = number_rows(side), number_columns(side)
    given = tile.load(a[first : first + together, 0:side, 0:side], edge="clip")
    lower = tile.broadcast(rows >= columns, given.shape)
    matrix = tile.where(lower, given, tile.transpose(given, 1, 2))
    exists = tile.reshape(first + tile.arange(0, together) < a.shape[0], (together, 1, 1))
    for k in tile.range(0, count, 1):
        column, row = pick(matrix, columns == k, 2), pick(matrix, rows == k, 1)
        square = pick(column, rows == k, 1)
        tile.assert_((square > 0) | ~exists, "cholesky: a matrix is not positive definite")
        root = tile.sqrt(square)
        column = replace(column / tile.broadcast(root, column.shape), rows == k, root)
        row = row / tile.broadcast(root, row.shape)
        change = tile.broadcast(column, matrix.shape) * tile.broadcast(row, matrix.shape)
        after = tile.broadcast((rows > k) & (columns > k), matrix.shape)
        matrix = replace(tile.where(after, matrix - change, matrix), columns == k, column)
    tile.store(out[first : first + together, 0:side, 0:side], tile.where(lower, matrix, 0.0), edge="clip")


@kernel
def orthogonalise_matrices(a, q, r, *, together, height, width):
    """Householder's QR factors q [L, R, K] and r [L, K, C] of a [L, R, C], on the grid (ceil(L / together),).

    `height` and `width` are powers of two that hold R and C. Sums are in f64, which holds the squares of f32.
    """
    first = tile.program_id(0) * together
    rows, columns, others = number_rows(height), number_columns(width), number_columns(height)
    matrix = tile.cast(tile.load(a[first : first + together, 0:height, 0:width], edge="clip"), "float64")
    basis = tile.where(tile.broadcast(rows == others, (together, height, height)), 1.0, tile.cast(0.0, "float64"))
    for k in tile.range(0, min(a.shape[1], a.shape[2]), 1):
        column = pick(matrix, columns == k, 2)
        head, factor, scale = find_reflection(pick(column, rows == k, 1), tile.sum(
            tile.where(tile.broadcast(rows > k, column.shape), column * column, 0.0), axis=1, keepdims=True
        ))  # fmt: skip
        vector = tile.where(tile.broadcast(rows > k, column.shape), column / tile.broadcast(scale, column.shape), 0.0)
        vector = replace(vector, rows == k, tile.ones((1, 1, 1), "float64"))
        along = tile.sum(tile.broadcast(vector, matrix.shape) * matrix, axis=1, keepdims=True)
        change = tile.broadcast(vector, matrix.shape) * tile.broadcast(along * factor, matrix.shape)
        matrix = replace(matrix - change, (columns == k) & (rows >= k), tile.where(rows == k, head, 0.0))
        across = tile.broadcast(tile.transpose(vector, 1, 2), basis.shape)
        seen = tile.sum(basis * across, axis=2, keepdims=True) * factor
        basis = basis - tile.broadcast(seen, basis.shape) * across
    tile.store(q[first : first + together, 0:height, 0:height], tile.cast(basis, q.dtype), edge="clip")
    tile.store(r[first : first + together, 0:height, 0:width], tile.cast(matrix, r.dtype), edge="clip")


# On a processor a vector register has an element of one matrix in each lane, and the steps are unrolled.

LANES = 8  # matrices of a program: a register of f64, in which they are computed as LAPACK is called
LEAST_BATCH = 8  # matrices, fewer of which the host computes


def load_matrix(x, at, rows, columns):
    """The elements of matrices, one in each lane, as rows of blocks."""
    return [[tile.cast(x[at, i, j], "float64") for j in range(columns)] for i in range(rows)]


def bring_pivot(pivot, others, k):
    """Rows with that of the largest element of column k first, which is exchanged with each smaller one before it."""
    done = []
    for other in others:
        larger = rank_pivot(other[k]) > rank_pivot(pivot[k])
        done = done + [[tile.where(larger, p, o) for p, o in zip(pivot, other, strict=True)]]  # noqa: RUF005
        pivot = [tile.where(larger, o, p) for p, o in zip(pivot, other, strict=True)]
    return pivot, done


def eliminate(row, pivot, k):
    """A row whose column k a pivot makes 0."""
    factor = row[k] / pivot[k]
    return row[: k + 1] + [x - factor * y for x, y in zip(row[k + 1 :], pivot[k + 1 :], strict=True)]


@kernel
def solve_in_lanes(a, b, out, *, side, width, lanes):
    """As `solve_systems`, a system in each of the `lanes` of a program, on the grid (ceil(L / lanes),)."""
    number = tile.program_id(0) * lanes + tile.arange(0, lanes)
    at = tile.minimum(number, a.shape[0] - 1)
    left, right = load_matrix(a, at, side, side), load_matrix(b, at, side, width)
    rows = [x + y for x, y in zip(left, right, strict=True)]
    upper, found = [], []
    for k in tile.static_range(side):
        pivot, rest = bring_pivot(rows[0], rows[1:], k)
        tile.assert_(pivot[k] != 0, "solve: a matrix is singular")
        rows, upper = [eliminate(row, pivot, k) for row in rest], upper + [pivot]  # noqa: RUF005
    for n in tile.static_range(side):
        row = upper[side - 1 - n]
        right = row[side:]
        for m in tile.static_range(n):
            right = [x - row[side - n + m] * y for x, y in zip(right, found[m], strict=True)]
        found = [[x / row[side - 1 - n] for x in right]] + found  # noqa: RUF005
    for i in tile.static_range(side):
        for c in tile.static_range(width):
            tile.store(out[number, i, c], tile.cast(found[i][c], out.dtype), mask=number < a.shape[0])


def reduce_element(value, left, right):
    """A value without the products of the elements of two parts of rows."""
    for x, y in zip(left, right, strict=True):
        value = value - x * y
    return value


@kernel
def factor_in_lanes(a, out, *, side, lanes):
    """As `factor_symmetric`, a matrix in each of the `lanes` of a program, on the grid (ceil(L / lanes),)."""
    number = tile.program_id(0) * lanes + tile.arange(0, lanes)
    at = tile.minimum(number, a.shape[0] - 1)
    given, lower = load_matrix(a, at, side, side), []
    for i in tile.static_range(side):
        row = []
        for j in tile.static_range(i):
            row = row + [reduce_element(given[i][j], row, lower[j][:j]) / lower[j][j]]  # noqa: RUF005
        square = reduce_element(given[i][i], row, row)
        tile.assert_(square > 0, "cholesky: a matrix is not positive definite")
        lower = lower + [row + [tile.sqrt(square)]]  # noqa: RUF005
    for i in tile.static_range(side):
        for j in tile.static_range(side):
            found = lower[i][j] if j <= i else tile.zeros((lanes,), "float64")
            tile.store(out[number, i, j], tile.cast(found, out.dtype), mask=number < a.shape[0])


def find_reflection(first, below):
    """Of a column with this first element and this sum of squares below: the first element after its reflection, the
    factor of the reflector, and what divides the elements below."""
    plain, size = below == 0, tile.sqrt(first * first + below)
    head = tile.where(plain, first, tile.where(first < 0, size, -size))
    factor = tile.where(plain, 0.0, (head - first) / tile.where(plain, 1.0, head))
    return head, factor, tile.where(plain, 1.0, first - head)


def make_reflector(column):
    """The reflector that makes a column 0 below its first element: that element then, its factor, and its vector below
    a 1. What is 0 there already is left alone (LAPACK's dlarfg)."""
    first, rest = column[0], column[1:]
    below = first * 0.0
    for x in rest:
        below = below + x * x
    head, factor, scale = find_reflection(first, below)
    return head, factor, [x / scale for x in rest]


def reflect(column, factor, vector):
    """A column times the reflector of a factor and a vector."""
    product = column[0]
    for x, v in zip(column[1:], vector, strict=True):
        product = product + v * x
    product = product * factor
    return [column[0] - product] + [x - product * v for x, v in zip(column[1:], vector, strict=True)]  # noqa: RUF005


@kernel
def orthogonalise_in_lanes(a, q, r, *, rows, columns, lanes):
    """Householder's QR factors q [L, rows, K] and r [L, K, columns] of a [L, rows, columns], a matrix in each of the
    `lanes` of a program, on the grid (ceil(L / lanes),)."""
    number = tile.program_id(0) * lanes + tile.arange(0, lanes)
    at, zero, count = tile.minimum(number, a.shape[0] - 1), tile.zeros((lanes,), "float64"), min(rows, columns)
    rest = [[tile.cast(a[at, i, j], "float64") for i in range(rows)] for j in range(columns)]
    upper, reflectors = [], []
    for k in tile.static_range(count):
        head, factor, vector = make_reflector(rest[0])
        rest = [reflect(column, factor, vector) for column in rest[1:]]
        upper = upper + [[zero] * k + [head] + [column[0] for column in rest]]  # noqa: RUF005
        reflectors, rest = reflectors + [(factor, vector)], [column[1:] for column in rest]  # noqa: RUF005
    found = []
    for n in tile.static_range(count):
        factor, vector = reflectors[count - 1 - n]
        unit = [zero + 1.0] + [zero] * (rows - count + n)  # noqa: RUF005
        found = [reflect(column, factor, vector) for column in [unit] + [[zero] + c for c in found]]  # noqa: RUF005
    for i in tile.static_range(rows):
        for j in tile.static_range(count):
            tile.store(q[number, i, j], tile.cast(found[j][i], q.dtype), mask=number < a.shape[0])
    for i in tile.static_range(count):
        for j in tile.static_range(columns):
            tile.store(r[number, i, j], tile.cast(upper[i][j], r.dtype), mask=number < a.shape[0])


# Larger matrices of a batch, a matrix in each lane as before, but in loops: the columns lie in memory one after the
# other, each element as a register of lanes, and several columns at a time hide the latency of their sums.

WIDE, TALL = 4, 8  # columns, and rows, of a block that is changed at a time
LEAST_PROGRAMS = 2  # whose lanes are full


def count_lanes(dtype: DType) -> int:
    """The matrices of a program: two registers."""
    return 16 if dtype == f32 else 8


def fits_columns(dtype: DType, batch: int, most: int, *sides: int) -> bool:
    """Whether a batch of matrices is computed by loops, one in each lane."""
    return dtype in (f32, f64) and batch >= LEAST_PROGRAMS * count_lanes(dtype) and max(sides) <= most


def load_columns(memory, x, at, first, rows, columns):
    """Read matrices, one in each lane, into the columns of a memory from `first` on."""
    for j in tile.range(0, columns, 1):
        for i in tile.range(0, rows, 1):
            memory[first + j, i, 0 : at.shape[0]] = tile.cast(x[at, i, j], memory.dtype)


def store_columns(out, memory, number, first, rows, columns):
    """Write the columns of a memory from `first` on to matrices, one in each lane."""
    for i in tile.range(0, rows, 1):
        for j in tile.range(0, columns, 1):
            found = tile.cast(memory[first + j, i, 0 : number.shape[0]], out.dtype)
            tile.store(out[number, i, j], found, mask=number < out.shape[0])


def clear(memory):
    """Fill a memory of columns with zeros."""
    count, rows, lanes = memory.shape
    for j in tile.range(0, count, 1):
        memory[j, 0:rows, 0:lanes] = tile.zeros((rows, lanes), memory.dtype)


@kernel
def factor_columns(a, out, *, side, lanes):
    """As `factor_in_lanes`, column by column in memory."""
    padded = ceil_divide(side, TALL) * TALL
    number = tile.program_id(0) * lanes + tile.arange(0, lanes)
    at = tile.minimum(number, a.shape[0] - 1)
    m = tile.alloc_shared((padded, padded, lanes), a.dtype)
    clear(m)
    for j in tile.range(0, side, 1):
        for i in tile.range(j, side, 1):
            m[j, i, 0:lanes] = a[at, i, j]
    for k in tile.range(0, side, 1):
        square = m[k, k, 0:lanes]
        tile.assert_(square > 0, "cholesky: a matrix is not positive definite")
        root = tile.sqrt(square)
        share = tile.reshape(1.0 / root, (1, lanes))
        for r in tile.range(k // TALL * TALL, side, TALL):
            m[k, r : r + TALL, 0:lanes] = m[k, r : r + TALL, 0:lanes] * share
        m[k, k, 0:lanes] = root
        for j in tile.range((k + 1) // WIDE * WIDE, side, WIDE):
            after = tile.reshape(j + tile.arange(0, WIDE), (WIDE, 1, 1)) > k
            factor = tile.reshape(m[k, j : j + WIDE, 0:lanes], (WIDE, 1, lanes))
            for r in tile.range(j // TALL * TALL, side, TALL):
                held = m[j : j + WIDE, r : r + TALL, 0:lanes]
                change = factor * tile.reshape(m[k, r : r + TALL, 0:lanes], (1, TALL, lanes))
                m[j : j + WIDE, r : r + TALL, 0:lanes] = tile.where(after, held - change, held)
    for i in tile.range(0, side, 1):
        for j in tile.range(0, side, 1):
            found = tile.where(i >= j, m[tile.minimum(i, j), i, 0:lanes], 0.0)
            tile.store(out[number, i, j], found, mask=number < a.shape[0])


def reflect_columns(m, vector, factor, first, last):
    """Columns from `first` on of a memory times the reflector of a vector and a factor."""
    _, rows, lanes = m.shape
    vectors = tile.broadcast(tile.reshape(vector, (1, rows, lanes)), (WIDE, rows, lanes))
    for j in tile.range(first // WIDE * WIDE, last, WIDE):
        held = m[j : j + WIDE, 0:rows, 0:lanes]
        along = tile.sum(held * vectors, axis=1, keepdims=True) * tile.reshape(factor, (1, 1, lanes))
        chosen = tile.reshape(j + tile.arange(0, WIDE), (WIDE, 1, 1)) >= first
        m[j : j + WIDE, 0:rows, 0:lanes] = tile.where(chosen, held - vectors * along, held)


@kernel
def orthogonalise_columns(a, q, r, *, rows, columns, lanes):
    """As `orthogonalise_in_lanes`, column by column in memory."""
    count = min(rows, columns)
    number = tile.program_id(0) * lanes + tile.arange(0, lanes)
    at = tile.minimum(number, a.shape[0] - 1)
    m = tile.alloc_shared((ceil_divide(columns, WIDE) * WIDE, rows, lanes), "float64")
    vectors = tile.alloc_shared((count, rows, lanes), "float64")
    factors = tile.alloc_shared((count, lanes), "float64")
    clear(m)
    load_columns(m, a, at, 0, rows, columns)
    place = tile.reshape(tile.arange(0, rows), (rows, 1))
    for k in tile.range(0, count, 1):
        column, first = m[k, 0:rows, 0:lanes], m[k, k, 0:lanes]
        below = tile.sum(tile.where(place > k, column * column, 0.0), axis=0)
        plain, size = below == 0, tile.sqrt(first * first + below)
        head = tile.where(plain, first, tile.where(first < 0, size, -size))
        factors[k, 0:lanes] = tile.where(plain, 0.0, (head - first) / tile.where(plain, 1.0, head))
        share = tile.where(plain, 0.0, 1.0 / tile.where(plain, 1.0, first - head))
        vectors[k, 0:rows, 0:lanes] = tile.where(place > k, column * tile.reshape(share, (1, lanes)), 0.0)
        vectors[k, k, 0:lanes] = tile.ones((lanes,), "float64")
        m[k, 0:rows, 0:lanes] = tile.where(place > k, 0.0, column)
        m[k, k, 0:lanes] = head
        reflect_columns(m, vectors[k, 0:rows, 0:lanes], factors[k, 0:lanes], k + 1, columns)
    store_columns(r, m, number, 0, count, columns)
    for j in tile.range(0, count, 1):
        m[j, 0:rows, 0:lanes] = tile.zeros((rows, lanes), "float64")
        m[j, j, 0:lanes] = tile.ones((lanes,), "float64")
    for n in tile.range(0, count, 1):
        k = count - 1 - n
        reflect_columns(m, vectors[k, 0:rows, 0:lanes], factors[k, 0:lanes], k, count)
    store_columns(q, m, number, 0, rows, count)


@kernel
def solve_columns(a, b, out, *, side, width, lanes):
    """As `solve_in_lanes`, column by column in memory: those of `a`, then those of `b`."""
    number = tile.program_id(0) * lanes + tile.arange(0, lanes)
    at = tile.minimum(number, a.shape[0] - 1)
    m = tile.alloc_shared((side + width, side, lanes), a.dtype)
    load_columns(m, a, at, 0, side, side)
    load_columns(m, b, at, side, side, width)
    place = tile.reshape(tile.arange(0, side), (side, 1))
    places = tile.broadcast(place, (side, lanes))
    for k in tile.range(0, side, 1):
        column = m[k, 0:side, 0:lanes]
        size = tile.where(place >= k, rank_pivot(column), -1.0)
        best = tile.broadcast(tile.max(size, axis=0, keepdims=True), (side, lanes))
        chosen = tile.min(tile.where(size == best, places, side), axis=0, keepdims=True)
        is_chosen = places == tile.broadcast(chosen, (side, lanes))
        pivot = tile.sum(tile.where(is_chosen, column, 0.0), axis=0)
        tile.assert_(pivot != 0, "solve: a matrix is singular")
        column = tile.where(is_chosen, tile.reshape(m[k, k, 0:lanes], (1, lanes)), column)
        factor = column / tile.reshape(pivot, (1, lanes))
        m[k, k, 0:lanes] = pivot
        for j in tile.range(k + 1, side + width, 1):
            other = m[j, 0:side, 0:lanes]
            found = tile.sum(tile.where(is_chosen, other, 0.0), axis=0)
            moved = tile.where(is_chosen, tile.reshape(m[j, k, 0:lanes], (1, lanes)), other)
            m[j, 0:side, 0:lanes] = tile.where(place > k, moved - factor * tile.reshape(found, (1, lanes)), moved)
            m[j, k, 0:lanes] = found
    for n in tile.range(0, side, 1):
        k = side - 1 - n
        for c in tile.range(side, side + width, 1):
            held, found = m[c, 0:side, 0:lanes], m[c, k, 0:lanes] / m[k, k, 0:lanes]
            rest = held - m[k, 0:side, 0:lanes] * tile.reshape(found, (1, lanes))
            m[c, 0:side, 0:lanes] = tile.where(place < k, rest, held)
            m[c, k, 0:lanes] = found
    store_columns(out, m, number, side, side, width)


def fits_lanes(dtype: DType, batch: int, side: int, width: int | None, most: int) -> bool:
    """Whether matrices are computed in lanes: the steps of a solution, or of a factor without a `width`, are few."""
    steps = side * side * (side + width) if width is not None else side**3 // 3 + side * side
    return dtype in (f32, f64) and batch >= LEAST_BATCH and steps <= most


def solve_lanes(a: Tensor, b: Tensor, function: Any = solve_in_lanes, lanes: int = LANES) -> Tensor:
    """X [..., N, K] with `a` X = `b`, one system in each lane."""
    held, side, width = _fold(a), int(b.shape[-2]), int(b.shape[-1])
    memory = OutputMemory(TensorType((held.shape[0], side, width), b.dtype))
    right, grid = reshape(b, shape=memory.type.shape), (ceil_divide(held.shape[0], lanes),)
    found = launch(function, grid, held, right, memory, side=side, width=width, lanes=lanes)
    return reshape(found, shape=b.shape)


def factor_lanes(x: Tensor, function: Any = factor_in_lanes, lanes: int = LANES) -> Tensor:
    """The lower triangular L [..., N, N] with L Lᵀ = `x`, one matrix in each lane."""
    held, side = _fold(x), int(x.shape[-1])
    memory, grid = OutputMemory(TensorType(tuple(held.shape), x.dtype)), (ceil_divide(held.shape[0], lanes),)
    return reshape(launch(function, grid, held, memory, side=side, lanes=lanes), shape=x.shape)


def fits_orthogonal_lanes(type: TensorType, most: int) -> bool:
    """Whether QR factors are computed in lanes: of f32, whose squares f64 holds, in few steps."""
    *outer, rows, columns = (int(n) for n in type.shape)
    steps = 2 * rows * columns * min(rows, columns)
    return type.dtype == f32 and math.prod(outer) >= LEAST_BATCH and steps <= most


def orthogonalise_lanes(x: Tensor, function: Any = orthogonalise_in_lanes) -> tuple[Tensor, ...]:
    """The QR factors of a batch, one matrix in each lane."""
    held, (rows, columns) = _fold(x), (int(n) for n in x.shape[-2:])
    count, lead = min(rows, columns), tuple(x.shape[:-2])
    shapes, grid = ((rows, count), (count, columns)), (ceil_divide(held.shape[0], LANES),)
    memories = [OutputMemory(TensorType((held.shape[0], *each), x.dtype)) for each in shapes]
    made = launch(function, grid, held, *memories, rows=rows, columns=columns, lanes=LANES)
    return tuple(reshape(each, shape=(*lead, *size)) for each, size in zip(made, shapes, strict=True))


def orthogonalise_batch(x: Tensor) -> tuple[Tensor, ...]:
    """The QR factors of a batch of small matrices, some in each program."""
    held, (rows, columns) = _fold(x), (int(n) for n in x.shape[-2:])
    count, lead = min(rows, columns), tuple(x.shape[:-2])
    height, width = power_of_two(rows), power_of_two(columns)
    together, shapes = max(BLOCK // (height * max(height, width)), 1), ((rows, count), (count, columns))
    memories = [OutputMemory(TensorType((held.shape[0], *each), x.dtype)) for each in shapes]
    grid = (ceil_divide(held.shape[0], together),)
    made = launch(orthogonalise_matrices, grid, held, *memories, together=together, height=height, width=width)
    return tuple(reshape(each, shape=(*lead, *size)) for each, size in zip(made, shapes, strict=True))


def is_small(dtype: DType, *sides: int) -> bool:
    """Whether the matrices of these sides, of f32 or f64, are computed here."""
    return dtype in (f32, f64) and all(0 < n <= MAX_SIDE for n in sides)


def solve_batch(a: Tensor, b: Tensor) -> Tensor:
    """X [..., N, K] with `a` X = `b`, for `a` [..., N, N] and `b` [..., N, K]."""
    count, width = int(b.shape[-2]), int(b.shape[-1])
    held, side, columns = _fold(a), power_of_two(count), power_of_two(width)
    function, together = solve_systems, max(BLOCK // (side * max(side, columns)), 1)
    if in_warps := fits_warp(a.dtype, count):
        function, together, columns = solve_in_warps, max(WARP_ROWS // side, 1), min(width, MOST_RIGHT)
    shape = (held.shape[0], count, width)
    grid = (ceil_divide(shape[0], together), *([ceil_divide(width, columns)] if in_warps else []))
    found = launch(
        function, grid, held, reshape(b, shape=shape), OutputMemory(TensorType(shape, b.dtype)), together=together,
        side=side, width=columns,
    )  # fmt: skip
    return reshape(found, shape=b.shape)


def factor_batch(x: Tensor) -> Tensor:
    """The lower triangular L [..., N, N] with L Lᵀ = `x`."""
    held, side = _fold(x), power_of_two(int(x.shape[-1]))
    function, together = factor_symmetric, max(BLOCK // (side * side), 1)
    if fits_warp(x.dtype, int(x.shape[-1])):
        function, together = factor_in_warps, max(WARP_ROWS // side, 1)
    memory = OutputMemory(TensorType(tuple(held.shape), x.dtype))
    grid = (ceil_divide(held.shape[0], together),)
    return reshape(launch(function, grid, held, memory, together=together, side=side), shape=x.shape)


def _fold(x: Tensor) -> Any:
    """The matrices of all leading axes as [L, M, N]."""
    return reshape(x, shape=(math.prod(int(n) for n in x.shape[:-2]), *x.shape[-2:]))
