"""Split products: f32 products on tensor cores, with operands as sums of three bf16 (Henry, Tang and Heinecke 2019).

An f32 is the sum of three bf16: its leading 8 bits, the next 8, and the last 8. Of the nine products of such parts, the
six that are larger than the rounding of an f32 product are added up, smallest first, by one bf16 product whose
contraction is six times as long. Tensor cores multiply bf16 exactly and add in f32.

Two facts bound the error. The three products left out are at most 2**-24 of a product of operands. Tensor cores cut off
the bits of a sum below an f32, once for 16 elements, where a sequential f32 product rounds for each element: the bound
is a quarter of the sequential one. Contractions longer than `MAX_DEPTH` are cut, because what is cut off always has the
same sign, and the parts are added in f32.

No such sum represents an infinity, NaN, a number that is rounded to an infinity, or one below `SMALLEST`: its last part
is NaN, and so is each result that it contributes to. Results that are not finite are computed again, from the operands,
in f32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import DType, TensorType, bf16, f16, f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.ops.tensor import basic, contractions, reduce, shape

# mypy: disable-error-code="operator, attr-defined, index"

HIGH, MIDDLE, LOW = 0, 1, 2  # the parts of a number
# The products of a left and a right part that are added up, smallest first.
LEFT_ORDER = (LOW, HIGH, MIDDLE, MIDDLE, HIGH, HIGH)
RIGHT_ORDER = (HIGH, LOW, MIDDLE, HIGH, MIDDLE, HIGH)
PRODUCTS = len(LEFT_ORDER)
SMALLEST = 2.0**-110  # of the numbers that are sums of three bf16, beside 0
MAX_DEPTH = 1024  # elements of a contraction that one product adds up
LEAST_DEPTH = 128  # elements of a part of a contraction that is cut to fill a GPU
MOST_CHUNKS = 33  # parts into which it is cut
BUSY_PROGRAMS = 132  # programs that keep a GPU busy
ALIGNMENT = 8  # bf16 elements of 16 bytes, to which rows are padded for tensor maps
SPLIT_BLOCK = 2048  # elements that a program splits
MOST_ADDED = 16  # sums of parts that the programs which check them add up; for more they are too few
CHECKED_ROWS, CHECKED_COLUMNS, CHECKED_DEPTH = 128, 128, 32  # the block of results that a program checks


def split_number(block):
    """A block of f32 as three blocks of bf16; the last one has NaN for numbers that are no such sum."""
    exact = (tile.abs(block) >= SMALLEST) | (block == 0.0)  # an infinity leaves NaN as the rest
    high = tile.cast(block, "bf16")
    rest = block - tile.cast(high, "f32")
    middle = tile.cast(rest, "bf16")
    low = tile.cast(tile.where(exact, rest - tile.cast(middle, "f32"), float("nan")), "bf16")
    return high, middle, low


def select_part(place, parts):
    """The part that an order names at a place."""
    return parts[0] if place == HIGH else parts[1] if place == MIDDLE else parts[2]


def has_nonfinite(block):
    """Whether a block of floats has an infinity or a NaN."""
    return tile.max(tile.where(block - block != 0.0, 1, 0)) > 0


@kernel
def split_parts(x, parts, *, order, rows, columns):
    """parts [S, P, O, R', C'] = the O parts of x [P, S, R, C] in this order, on the grid (P, S, blocks of R' · C').

    Rows after R and columns after C are zeros.
    """
    one, chunk = tile.program_id(0), tile.program_id(1)
    across = tile.cdiv(parts.shape[4], columns)
    row, column = tile.program_id(2) // across * rows, tile.program_id(2) % across * columns
    block = tile.load(x[one, chunk, row : row + rows, column : column + columns], edge="clip")
    found = split_number(block)
    for place in tile.static_range(parts.shape[2]):
        part = select_part(order[place], found)
        tile.store(parts[chunk, one, place, row : row + rows, column : column + columns], part, edge="clip")


@kernel
def add_checked(sums, a, b, out, *, turned_a, turned_b, BM, BN, BK, turned_sums=False):
    """out [Z, M, N] = the sum of sums [S, Z, M, N'], or a · b in f32 where that is not finite.

    On the grid (Z, blocks of M, blocks of N). `a` is [Z or 1, M, K], or [Z or 1, K, M] if turned; likewise `b`, and
    each of `sums`.
    """
    z, i, j = tile.program_id(0), tile.program_id(1) * BM, tile.program_id(2) * BN
    if turned_sums:
        total = tile.load(sums[0, z, j : j + BN, i : i + BM], edge="clip")
        for part in tile.static_range(1, sums.shape[0]):
            total = total + tile.load(sums[part, z, j : j + BN, i : i + BM], edge="clip")
        total = tile.transpose(total)
    else:
        total = tile.load(sums[0, z, i : i + BM, j : j + BN], edge="clip")
        for part in tile.static_range(1, sums.shape[0]):
            total = total + tile.load(sums[part, z, i : i + BM, j : j + BN], edge="clip")
    depth = a.shape[1] if turned_a else a.shape[2]
    wrong = has_nonfinite(total)
    product = tile.zeros((BM, BN), "f32")
    za, zb = z % a.shape[0], z % b.shape[0]
    for k in tile.range(0, tile.where(wrong, depth, 0), BK):
        if turned_a:
            left = tile.transpose(tile.load(a[za, k : k + BK, i : i + BM], edge="clip"))
        else:
            left = tile.load(a[za, i : i + BM, k : k + BK], edge="clip")
        if turned_b:
            right = tile.transpose(tile.load(b[zb, j : j + BN, k : k + BK], edge="clip"))
        else:
            right = tile.load(b[zb, k : k + BK, j : j + BN], edge="clip")
        product = product + tile.dot(left, right)
    tile.store(out[z, i : i + BM, j : j + BN], tile.where(wrong, product, total), edge="clip")


def join_sums(sums: Tensor) -> Tensor:
    """The sums [S, ...] of parts, or the sum of all, [1, ...], where one program would add too many."""
    return sums if int(sums.shape[0]) <= MOST_ADDED else reduce.sum(sums, axis=(0,), keepdims=True)


# An operand of a product as memory: what it is a view of.


@dataclass(frozen=True)
class ProductOperand:
    """An operand: a value of [Z or 1, rows, columns] in memory, and whether the operand is its transpose.

    The value is that of `source` after `moves` of its elements.
    """

    source: Value
    turned: bool = False
    moves: tuple[Node, ...] = ()

    @property
    def folded(self) -> tuple[int, int, int]:
        """The shape in memory, with one axis for the batch."""
        *lead, rows, columns = (int(n) for n in get_shape(self.moves[-1].out if self.moves else self.source))
        return math.prod(lead), rows, columns

    def move(self, x: Tensor) -> Tensor:
        """The value, from that of `source`."""
        for node in self.moves:
            x = node.op(x, **node.attrs)
        return x


def find_operand(uses: UseDef, value: Value) -> ProductOperand:
    """The operand behind transposes, unit axes and broadcasts of a whole batch."""
    node, sizes = uses.get(value), get_shape(value)
    if node is None or len(sizes) < 2:
        return ProductOperand(value)
    (inner,) = node.args[:1] or (value,)
    if node.op is shape.permute and _swaps_last_axes(node.attrs["axes"]):
        found = find_operand(uses, inner)
        return ProductOperand(found.source, not found.turned)
    if node.op in (basic.broadcast_to, shape.reshape) and _keeps_matrix(get_shape(inner), sizes):
        return find_operand(uses, inner)
    return ProductOperand(value)


def find_narrow_type(uses: UseDef, value: Value) -> DType | None:
    """The 16-bit float that all elements of an f32 value have been cast from, through moves of elements; or None."""
    node = uses.get(value)
    if node is None:
        return None
    if node.op is basic.cast:
        before = get_tensor_type(node.args[0]).dtype
        return before if before in (bf16, f16) else None
    if node.op is shape.concatenate:
        found = {find_narrow_type(uses, v) for v in node.args}
        return found.pop() if len(found) == 1 else None
    moved = node.op is shape.pad and node.attrs["value"] == 0 or node.op in MOVES
    return find_narrow_type(uses, node.args[0]) if moved else None


MOVES = (shape.permute, shape.reshape, shape.slice_, shape.gather, basic.broadcast_to)


def _swaps_last_axes(axes: Any) -> bool:
    rank = len(axes)
    return tuple(a % rank for a in axes) == (*range(rank - 2), rank - 1, rank - 2)


def _keeps_matrix(inner: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    """Whether a view only repeats one matrix, or folds the axes before it."""
    return len(inner) >= 2 and inner[-2:] == outer[-2:] and math.prod(inner[:-2]) in (1, math.prod(outer[:-2]))


# The product.


@dataclass(frozen=True)
class SplitProduct:
    """A product of f32 [Z, M, K] · [Z, K, N] that is computed with split operands."""

    left: ProductOperand
    right: ProductOperand
    sizes: tuple[int, int, int, int]  # Z, M, K, N
    result: tuple[int, ...]

    @property
    def chunks(self) -> int:
        """The parts into which the contraction is cut (split K): even ones, where there are some.

        Results of few blocks are cut further, as long as all blocks run at once.
        """
        batch, m, depth, n = self.sizes
        least, programs = ceil_divide(depth, MAX_DEPTH), batch * ceil_divide(m, 64) * ceil_divide(n, 128)
        even = [c for c in range(least, max(2 * least, MOST_CHUNKS)) if depth % (c * ALIGNMENT) == 0]
        filling = [c for c in even if c * LEAST_DEPTH <= depth and c * programs <= BUSY_PROGRAMS]
        return max(filling) if filling else even[0] if even and even[0] < 2 * least else least

    @property
    def depth(self) -> int:
        """The length of the contraction, with the zeros that make its parts even."""
        return round_up(self.sizes[2], self.chunks * ALIGNMENT) if self.chunks > 1 else self.sizes[2]

    def estimate_seconds(self) -> float:
        """The time of the launches: both splits and the check by bytes, the product by operations."""
        batch, m, k, n = self.sizes
        read = sum(math.prod(side.folded) for side in (self.left, self.right)) * (4 + 2 * PRODUCTS)
        checked = batch * m * n * 4 * (2 * self.chunks + 1)
        return (read + checked) / MEMORY_RATE + 2 * PRODUCTS * batch * m * n * k / BF16_RATE + 3 * LAUNCH_SECONDS

    def compute(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of the operands' sources."""
        batch, m, _, n = self.sizes
        a, b = (shape.reshape(x, shape=side.folded) for x, side in ((a, self.left), (b, self.right)))
        left = self._split(a, self.left, LEFT_ORDER, not self.left.turned)
        right = self._split(b, self.right, RIGHT_ORDER, self.right.turned)
        sums = contractions.matmul(left, right, dtype=f32)
        grid = batch, ceil_divide(m, CHECKED_ROWS), ceil_divide(n, CHECKED_COLUMNS)
        memory = OutputMemory(TensorType((batch, m, n), f32))
        constants = {"turned_a": self.left.turned, "turned_b": self.right.turned}
        blocks = {"BM": CHECKED_ROWS, "BN": CHECKED_COLUMNS, "BK": CHECKED_DEPTH}
        return shape.reshape(
            launch(add_checked, grid, join_sums(sums), a, b, memory, **constants, **blocks), shape=self.result
        )

    def _split(self, x: Tensor, side: ProductOperand, order: tuple[int, ...], deep: bool) -> Tensor:
        """The parts of an operand: [S, Z, M, 6 K'] or [S, Z, 6 K', N']; `deep`: K is its inner axis in memory."""
        chunks, missing = self.chunks, self.depth - self.sizes[2]
        if missing:
            x = shape.pad(x, low=(0, 0, 0), high=(0, 0, missing) if deep else (0, missing, 0), value=0)
        batch, rows, columns = (int(n) for n in x.shape)
        inner = (batch * rows, chunks, 1, columns // chunks) if deep else (batch, chunks, rows // chunks, columns)
        parts = split_memory(shape.reshape(x, shape=inner), order, not deep)
        *_, height, width = (int(n) for n in parts.shape)
        whole = (chunks, batch, rows, PRODUCTS * width) if deep else (chunks, batch, PRODUCTS * height, width)
        parts = shape.reshape(parts, shape=whole)
        if side.turned:
            parts = shape.permute(parts, axes=(0, 1, 3, 2))
        lead = (chunks, self.sizes[0])
        return parts if parts.shape[:2] == lead else basic.broadcast_to(parts, shape=(*lead, *parts.shape[2:]))


def split_memory(x: Tensor, order: tuple[int, ...], pad_rows: bool = False) -> Tensor:
    """The parts of x [P, S, R, C] as [S, P, O, R', C']: columns are padded to units of 16 bytes, rows as much."""
    count, chunks, rows, columns = (int(n) for n in x.shape)
    high, wide = round_up(rows, ALIGNMENT) if pad_rows else rows, round_up(columns, ALIGNMENT)
    split, folded = (high, wide), (high, wide) == (rows, columns)
    if folded:  # all rows as one
        x, split = shape.reshape(x, shape=(count, chunks, 1, rows * columns)), (1, rows * columns)
    width = min(SPLIT_BLOCK, 1 << (split[1] - 1).bit_length())
    height = min(SPLIT_BLOCK // width, 1 << (split[0] - 1).bit_length())
    memory = OutputMemory(TensorType((chunks, count, len(order), *split), bf16))
    grid = count, chunks, ceil_divide(split[0], height) * ceil_divide(split[1], width)
    out = launch(split_parts, grid, x, memory, order=order, rows=height, columns=width)
    return shape.reshape(out, shape=(chunks, count, len(order), high, wide))


# Where it pays: the time of both ways, by rates that a GPU with tensor cores reaches.


LEAST_SIZE = 64  # rows, columns and depth
F32_RATE, BF16_RATE = 30e12, 600e12  # operations a second of products
F32_ROWS, LEAST_F32_ROWS = 64, 8  # of a block of a product in f32
F32_DEPTH, F32_UNIT = 64, 4  # elements of its rounds, and of rows in memory that are loaded four at a time
UNALIGNED_COST = 1.4  # of its time with other rows
FEW_ROWS_RATE, F32_MEMORY_RATE = 0.75, 2e12  # the rate of products of fewer rows; bytes a second that they read
MEMORY_RATE = 3.6e12  # bytes a second
LAUNCH_SECONDS = 4e-6


def estimate_f32_seconds(sizes: tuple[int, int, int, int], sides: tuple[ProductOperand, ProductOperand]) -> float:
    """The time of a product in f32: of whole blocks, or of reading the operands."""
    batch, m, k, n = sizes
    k = k if k <= F32_DEPTH else round_up(k, F32_DEPTH)
    few = min(m, n)
    padded = max(LEAST_F32_ROWS, 1 << (few - 1).bit_length()) if few < F32_ROWS else round_up(few, F32_ROWS)
    read = 4 * batch * k * (m + n)
    rate = F32_RATE if few >= F32_ROWS else FEW_ROWS_RATE * F32_RATE
    rate /= UNALIGNED_COST if any(side.folded[-1] % F32_UNIT for side in sides) else 1
    return max(2 * batch * k * max(m, n) * padded / rate, read / F32_MEMORY_RATE) + LAUNCH_SECONDS


def measure_product(left: Value, right: Value) -> tuple[tuple[int, int, int, int], tuple[int, ...]] | None:
    """Z, M, K and N of a product [..., M, K] · [..., K, N], and the shape of its result; or None without numbers."""
    if not all(isinstance(n, int) and n for v in (left, right) for n in get_shape(v)):
        return None
    (*lead, m, k), n = (int(s) for s in get_shape(left)), int(get_shape(right)[-1])
    return (math.prod(lead), m, k, n), (*lead, m, n)


def match_split_product(uses: UseDef, left: Value, right: Value) -> SplitProduct | None:
    """The product of two f32 operands as a split one, or None where that does not pay."""
    measured = measure_product(left, right)
    if measured is None or find_narrow_type(uses, left) or find_narrow_type(uses, right):
        return None  # a product of narrow floats is one on tensor cores anyway
    sides = find_operand(uses, left), find_operand(uses, right)
    found = SplitProduct(*sides, *measured)
    if min(measured[0][1:]) < LEAST_SIZE:
        return None
    return found if found.estimate_seconds() < estimate_f32_seconds(measured[0], sides) else None
