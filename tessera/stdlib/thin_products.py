"""Thin products: f32 products of few rows or columns on tensor cores, whose wide operand is split in registers.

A product of few rows reads its right operand once, so that writing its three bf16 parts to memory first
(`tessera.stdlib.split_products`) takes longer than the product. Here only the narrow operand is split in memory. Blocks
of the wide one are read as f32, split in registers, and are the register operand of warpgroup products (CUTLASS's
mixed-input GEMM). The contraction is cut into chunks, whose sums are added up and checked as those of split products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import TensorType, f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import shape
from tessera.stdlib.operand_copies import ROW_BYTES
from tessera.stdlib.split_products import (
    BUSY_PROGRAMS,
    HIGH,
    LAUNCH_SECONDS,
    LOW,
    MAX_DEPTH,
    MEMORY_RATE,
    MIDDLE,
    ProductOperand,
    add_checked,
    estimate_f32_seconds,
    find_narrow_type,
    find_operand,
    has_nonfinite,
    join_sums,
    match_split_product,
    measure_product,
    split_memory,
    split_number,
)

# mypy: disable-error-code="operator, attr-defined, index"

PARTS = (HIGH, MIDDLE, LOW)  # of the narrow operand, in memory
ROWS, ROUND = 128, 64  # rows of a block of the wide operand, and elements of the contraction in a round
COLUMNS = (64, 128)  # of a block of the narrow operand
AHEAD_COLUMNS = 64  # beside so many the registers hold a second block of the wide operand
CHECKED_ROWS, CHECKED_COLUMNS, CHECKED_DEPTH = 64, 64, 32  # the block of results that a program checks
LEAST_ROWS, LEAST_DEPTH, LEAST_COLUMNS = 64, 32, 3  # of both operands
MOST_COLUMNS = 768  # where more blocks of columns split the wide operand again than pays
SHORT_DEPTH = 256  # of contractions that take less time than their results, however often operands are split
LEAST_ELEMENTS = 1 << 18  # of the wide operand, with its batch
MOST_CHUNKS = 33
# Seconds of a round of a block by its columns, with tensor maps and without, and of a program's start and end.
ROUND_SECONDS = {True: {64: 1.3e-6, 128: 2.3e-6}, False: {64: 2.2e-6, 128: 3e-6}}
PROGRAM_SECONDS = 2e-6
# The least seconds of such a program without tensor maps: nothing is fetched while the one before ends.
LEAST_SECONDS = {64: 5.5e-6, 128: 8.5e-6}


def add_products(total, rest, left, right):
    """Sums of the products of the leading parts, and of the five others, which cut nothing off the first ones.

    Products that share a right part follow each other.
    """
    high, middle, low = left
    front, second, last = right
    rest = rest + tile.dot(high, last)
    rest = rest + tile.dot(middle, second)
    rest = rest + tile.dot(high, second)
    rest = rest + tile.dot(low, front)
    rest = rest + tile.dot(middle, front)
    return total + tile.dot(high, front), rest


def load_wide(wide, z, i, k, inside, turned, BM, BK):
    """A block of the wide operand, where it is inside."""
    if turned:
        if inside is True:
            return tile.transpose(tile.load(wide[z, k : k + BK, i : i + BM], edge="clip"))
        mask = tile.broadcast(inside, (BK, BM))
        return tile.transpose(tile.load(wide[z, k : k + BK, i : i + BM], edge="clip", mask=mask))
    if inside is True:
        return tile.load(wide[z, i : i + BM, k : k + BK], edge="clip")
    return tile.load(wide[z, i : i + BM, k : k + BK], edge="clip", mask=tile.broadcast(inside, (BM, BK)))


def multiply_in_f32(total, wide, narrow, zw, zn, i, j, wrong, turned, flipped):
    """A block of results, or where it is not finite the sums of the products of all elements in f32."""
    rows, columns = total.shape
    total, depth = tile.where(wrong, 0.0, total), wide.shape[1] if turned else wide.shape[2]
    for k in tile.range(0, tile.where(wrong, depth, 0), 1):
        if turned:
            left = tile.load(wide[zw, k : k + 1, i : i + rows], edge="clip")
        else:
            left = tile.load(wide[zw, i : i + rows, k : k + 1], edge="clip")
        if flipped:
            right = tile.load(narrow[zn, j : j + columns, k : k + 1], edge="clip")
        else:
            right = tile.load(narrow[zn, k : k + 1, j : j + columns], edge="clip")
        total = total + tile.reshape(left, (rows, 1)) * tile.reshape(right, (1, columns))
    return total


@kernel
def multiply_split(wide, narrow, parts, out, *, turned, flipped, exchanged, depth, ahead, BM, BN, BK):
    """out [S, Z, R, C] = for each s the product over the elements s · depth to (s + 1) · depth of the contraction.

    On the grid (S · Z, blocks of R, blocks of C), for `wide` [Z or 1, R, K] ([Z or 1, K, R] if turned) in f32, and
    `parts` [Z or 1, 3, K, C] ([Z or 1, 3, C, K] if flipped), the bf16 parts of the narrow operand. With `ahead` the
    block of the next round is loaded while tensor cores multiply; without, copies fetch it where tensor maps can.
    One chunk is the result, [1, Z, C, R] if `exchanged`: where it is not finite, it is computed again in f32.
    """
    chunk, z = tile.program_id(0) // out.shape[1], tile.program_id(0) % out.shape[1]
    i, j, first = tile.program_id(1) * BM, tile.program_id(2) * BN, chunk * depth
    zw, zp = z % wide.shape[0], z % parts.shape[0]
    total, rest = tile.zeros((BM, BN), "f32"), tile.zeros((BM, BN), "f32")
    if ahead:
        block = load_wide(wide, zw, i, first, True, turned, BM, BK)
    for k in tile.range(first, first + depth, BK):
        if ahead:
            following = load_wide(wide, zw, i, k + BK, k + BK < first + depth, turned, BM, BK)
        else:
            block = load_wide(wide, zw, i, k, True, turned, BM, BK)
        left = split_number(block)
        if flipped:
            last = tile.transpose(tile.load(parts[zp, LOW, j : j + BN, k : k + BK], edge="clip"))
            second = tile.transpose(tile.load(parts[zp, MIDDLE, j : j + BN, k : k + BK], edge="clip"))
            front = tile.transpose(tile.load(parts[zp, HIGH, j : j + BN, k : k + BK], edge="clip"))
        else:
            last = tile.load(parts[zp, LOW, k : k + BK, j : j + BN], edge="clip")
            second = tile.load(parts[zp, MIDDLE, k : k + BK, j : j + BN], edge="clip")
            front = tile.load(parts[zp, HIGH, k : k + BK, j : j + BN], edge="clip")
        total, rest = add_products(total, rest, left, (front, second, last))
        if ahead:
            block = following
    total = total + rest
    if out.shape[0] == 1:
        total = multiply_in_f32(total, wide, narrow, zw, zp, i, j, has_nonfinite(total), turned, flipped)
    if exchanged:
        tile.store(out[chunk, z, j : j + BN, i : i + BM], tile.transpose(total), edge="clip")
    else:
        tile.store(out[chunk, z, i : i + BM, j : j + BN], total, edge="clip")


@dataclass(frozen=True)
class ThinProduct:
    """A product of f32 [Z, M, K] · [Z, K, N] whose wide operand is split in registers."""

    left: ProductOperand
    right: ProductOperand
    sizes: tuple[int, int, int, int]  # Z, M, K, N
    result: tuple[int, ...]
    columns: int  # of a block of the narrow operand
    chunks: int  # of the contraction

    @property
    def wide_left(self) -> bool:
        """Whether the left operand is the wide one."""
        return self.sizes[1] >= self.sizes[3]

    @property
    def wide(self) -> ProductOperand:
        """The operand of many rows or columns."""
        return self.left if self.wide_left else self.right

    @property
    def narrow(self) -> ProductOperand:
        """The other operand."""
        return self.right if self.wide_left else self.left

    @property
    def extents(self) -> tuple[int, int]:
        """The rows of the wide operand, and the columns of the narrow one."""
        _, m, _, n = self.sizes
        return max(m, n), min(m, n)

    @property
    def depth(self) -> int:
        """The elements of a chunk of the contraction."""
        return round_up(ceil_divide(self.sizes[2], self.chunks), ROUND)

    @property
    def mapped(self) -> bool:
        """Whether tensor maps load the wide operand: they need rows of whole units of 16 bytes."""
        return self.wide.folded[-1] * 4 % ROW_BYTES == 0

    def compute(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of the operands' sources."""
        batch, (rows, columns) = self.sizes[0], self.extents
        a, b = (shape.reshape(x, shape=side.folded) for x, side in ((a, self.left), (b, self.right)))
        wide, narrow = (a, b) if self.wide_left else (b, a)
        count, *inner = (int(s) for s in narrow.shape)
        parts = split_memory(shape.reshape(narrow, shape=(count, 1, *inner)), PARTS)
        parts = shape.reshape(parts, shape=parts.shape[1:])
        grid = self.chunks * batch, ceil_divide(rows, ROWS), ceil_divide(columns, self.columns)
        # The contraction lies along the rows in memory of a left operand's transpose, and of a right operand.
        turned = self.wide.turned == self.wide_left
        flipped = self.narrow.turned == self.wide_left
        exchanged = self.chunks == 1 and not self.wide_left
        size = (self.chunks, batch, *((columns, rows) if exchanged else (rows, columns)))
        constants = {"turned": turned, "flipped": flipped, "exchanged": exchanged, "depth": self.depth}
        constants["ahead"] = not self.mapped and self.columns <= AHEAD_COLUMNS
        blocks, memory = {"BM": ROWS, "BN": self.columns, "BK": ROUND}, OutputMemory(TensorType(size, f32))
        sums = launch(multiply_split, grid, wide, narrow, parts, memory, **constants, **blocks)
        return shape.reshape(sums if self.chunks == 1 else self.check_sums(sums, a, b), shape=self.result)

    def check_sums(self, sums: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The sum over the chunks, [Z, M, N]."""
        batch, m, _, n = self.sizes
        grid = batch, ceil_divide(m, CHECKED_ROWS), ceil_divide(n, CHECKED_COLUMNS)
        constants = {
            "turned_a": self.left.turned, "turned_b": self.right.turned, "turned_sums": not self.wide_left,
        }  # fmt: skip
        blocks = {"BM": CHECKED_ROWS, "BN": CHECKED_COLUMNS, "BK": CHECKED_DEPTH}
        memory = OutputMemory(TensorType((batch, m, n), f32))
        return cast(Tensor, launch(add_checked, grid, join_sums(sums), a, b, memory, **constants, **blocks))

    def estimate_seconds(self) -> float:
        """The time of all launches: the larger of the products' and of the memory's, in waves of programs."""
        batch, (rows, columns) = self.sizes[0], self.extents
        blocks = ceil_divide(columns, self.columns)
        programs = batch * self.chunks * ceil_divide(rows, ROWS) * blocks
        waves = ceil_divide(programs, BUSY_PROGRAMS)
        rounds = ceil_divide(self.depth, ROUND)
        program = rounds * ROUND_SECONDS[self.mapped][self.columns] + PROGRAM_SECONDS
        busy = waves * (program if self.mapped else max(program, LEAST_SECONDS[self.columns]))
        read = 4 * math.prod(self.wide.folded) + 4 * self.chunks * batch * rows * columns
        checked = 0 if self.chunks == 1 else 4 * (self.chunks + 1) * batch * rows * columns
        moved = checked + 10 * math.prod(self.narrow.folded)
        launches = 2 if self.chunks == 1 else 3
        return max(busy, read / MEMORY_RATE) + moved / MEMORY_RATE + launches * LAUNCH_SECONDS


def match_thin_product(uses: UseDef, left: Value, right: Value) -> ThinProduct | None:
    """The product of two f32 operands as a thin one, or None where another way takes less time."""
    measured = measure_product(left, right)
    if measured is None or find_narrow_type(uses, left) or find_narrow_type(uses, right):
        return None
    batch, m, k, n = measured[0]
    rows, columns = max(m, n), min(m, n)
    most = math.inf if k <= SHORT_DEPTH else MOST_COLUMNS
    if rows < LEAST_ROWS or k < LEAST_DEPTH or not LEAST_COLUMNS <= columns <= most:
        return None
    if batch * rows * k < LEAST_ELEMENTS:
        return None
    sides = find_operand(uses, left), find_operand(uses, right)
    tried = [ThinProduct(*sides, *measured, width, chunks) for width, chunks in _list_choices(k, columns)]
    found, split = min(tried, key=ThinProduct.estimate_seconds), match_split_product(uses, left, right)
    others = estimate_f32_seconds(measured[0], sides) if split is None else split.estimate_seconds()
    return found if found.estimate_seconds() < others else None


def _list_choices(k: int, columns: int) -> Iterator[tuple[int, int]]:
    """The columns of a block, and the chunks of a contraction, that are tried: chunks of different depths, all used."""
    width = next((n for n in COLUMNS if n >= columns), COLUMNS[-1])
    least = ceil_divide(k, MAX_DEPTH)
    for chunks in range(least, max(2 * least, MOST_CHUNKS) + 1):
        depth = round_up(ceil_divide(k, chunks), ROUND)
        if (chunks - 1) * depth < k:
            yield width, chunks
