"""Split K: products with few results, cut along the contraction until they fill a GPU (CUTLASS), and products whose
operands need other rows.

A product gives each block of results to one program. Few rows or columns leave most of a GPU idle, or make blocks too
small for warpgroup products. So the blocks stay large, also where rows are fewer, and each is computed by several
programs, over parts of the contraction. Their sums, in the type that products accumulate in, are added up in the order
of the parts. Operands that no tensor map loads are copied first (`tessera.stdlib.operand_copies`), where the estimated
time of the copies and of the faster product is less.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import DType, TensorType, bf16, f16, f32, f64, int8, int32, uint8
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_tensor_type
from tessera.lower.lowering_plan import BLOCK_RATES, STEP_SECONDS, WARPGROUP_SIDE, LoweringPlan, estimate_waves
from tessera.ops.tensor import basic, contractions, reduce, shape
from tessera.stdlib.gemm import zero_accumulator
from tessera.stdlib.operand_copies import OperandCopy, put_side_by_side
from tessera.stdlib.split_products import (
    BF16_RATE,
    BUSY_PROGRAMS,
    MEMORY_RATE,
    MOVES,
    ProductOperand,
    find_narrow_type,
    find_operand,
    measure_product,
)

# mypy: disable-error-code="operator, attr-defined, index"

FEW_COLUMNS, COLUMNS, MORE_COLUMNS = 64, 128, 256  # of a block of results
ROUND_BYTES = 128  # of the rows that a round contracts
LEAST_DEPTH = 512  # elements of a part of the contraction
FEW_ROWS = 15  # products of so many rows are bound by memory
LEAST_ELEMENTS = 1 << 20  # of the right operand, for the launch that adds up to pay
LONG_DEPTH = 2048  # contractions that are cut where rows are many
WAVE_ROWS = 128  # rows from which on programs compute whole blocks
MOST_PARTS, WAVE_GAIN = 8, 0.9  # of a product of many blocks; what its time must fall to
LARGE_BLOCKS = ((128, 128), (128, 256), (64, 256))  # of a launch where waves choose no blocks
WHOLE_GAIN = 0.95  # of the time of parts, from which on one launch is taken
SMALL_BLOCK_RATE = 0.85  # of blocks of 128 x 128
FEW_COLUMNS_RATE = 0.6  # the rate of blocks of few columns
UNMAPPED_RATE = 110e12  # operations a second of 16-bit products without tensor maps, on a GPU that they fill
COPY_RATE = 2e12  # bytes a second that copies of operands read and write
ROWS_RATE = 3e12  # the same of copies whose rows are as short as before
COPY_SECONDS = 3e-6  # of a launch more
# The types of results that products of a type have here; the first is what they accumulate in.
RESULT_TYPES = {bf16: (f32, bf16), f16: (f32, f16), int8: (int32,), uint8: (int32,), f32: (f32,), f64: (f64,)}
# Products by multiply-add, and of doubles, whose instructions of tensor cores need no tensor maps.
SCALAR_TYPES = (f32, f64)
SCALAR_ROWS, SCALAR_ELEMENTS, SCALAR_ROUND = 64, 1 << 13, 32  # of a block, at most, and of a round
SCALAR_DEPTH, SCALAR_PROGRAMS = 128, 528  # a part of the contraction; programs that hide the latency of memory
LEAST_DOUBLES = 64  # rows, columns and depth of products of f64, which tensor cores multiply
LONG_SCALAR_DEPTH, LEAST_PARTS = 1024, 2  # so long, and in so many parts, that the launch that adds up pays
# Products on a processor that are cut in parts so long: results of a block, whose operands a program packs once.
DEEP_PART, DEEP_ROWS, DEEP_COLUMNS, LEAST_DEEP_ROWS, LEAST_DEEP_COLUMNS = 1024, 256, 128, 48, 32
LANES, DEEP_ROUND, MOST_PADDING = 16, 16, 1.1  # columns of a register; elements of a round are a multiple of this


@kernel
def multiply_chunks(a, b, out, *, turned_a, turned_b, depth, BM, BN, BK):
    """out [S, Z, M, N] = for each s the product over the elements s · depth to (s + 1) · depth of the contraction.

    On the grid (S · Z, blocks of M, blocks of N). `a` is [Z or 1, M, K], or [Z or 1, K, M] if turned; likewise `b`.
    """
    chunk, z = tile.program_id(0) // out.shape[1], tile.program_id(0) % out.shape[1]
    i, j, first = tile.program_id(1) * BM, tile.program_id(2) * BN, chunk * depth
    za, zb = z % a.shape[0], z % b.shape[0]
    total = zero_accumulator(a, (BM, BN))
    for k in tile.range(first, first + depth, BK):
        if turned_a:
            left = tile.transpose(tile.load(a[za, k : k + BK, i : i + BM], edge="clip"))
        else:
            left = tile.load(a[za, i : i + BM, k : k + BK], edge="clip")
        if turned_b:
            right = tile.transpose(tile.load(b[zb, j : j + BN, k : k + BK], edge="clip"))
        else:
            right = tile.load(b[zb, k : k + BK, j : j + BN], edge="clip")
        total = total + tile.dot(left, right)
    tile.store(out[chunk, z, i : i + BM, j : j + BN], tile.cast(total, out.dtype), edge="clip")


@dataclass(frozen=True)
class ChunkedProduct:
    """A product [Z, M, K] · [Z, K, N] whose contraction is cut into `chunks` parts."""

    left: ProductOperand
    right: ProductOperand
    sizes: tuple[int, int, int, int]  # Z, M, K, N
    result: tuple[int, ...]
    dtype: DType
    copies: tuple[OperandCopy, OperandCopy]
    rows: int  # of a block of results
    columns: int
    chunks: int
    round: int  # elements of the contraction

    def compute(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of the operands' sources."""
        (batch, m, k, n), (left, right) = self.sizes, self.copies
        a, b = self.left.move(a), self.right.move(b)
        a, b = (copy.apply(shape.reshape(x, shape=copy.sizes)) for x, copy in ((a, left), (b, right)))
        wide = RESULT_TYPES[a.dtype][0]
        memory = OutputMemory(TensorType((self.chunks, batch, m, n), wide if self.chunks > 1 else self.dtype))
        grid = self.chunks * batch, ceil_divide(m, self.rows), ceil_divide(n, self.columns)
        constants = {"turned_a": self.left.turned != left.turns, "turned_b": self.right.turned != right.turns}
        blocks = {"depth": round_up(ceil_divide(k, self.chunks), self.round), "BM": self.rows, "BN": self.columns}
        sums = launch(multiply_chunks, grid, a, b, memory, **constants, **blocks, BK=self.round)
        if self.chunks > 1:
            sums = basic.cast(reduce.sum(sums, axis=(0,), keepdims=False), dtype=self.dtype)
        return shape.reshape(sums, shape=self.result)


@dataclass(frozen=True)
class JoinedProduct:
    """A matrix [M, K] times each of a batch [Z, K, N] of short rows, as a product of matrices with rows of Z · N."""

    left: ProductOperand
    right: ProductOperand
    sizes: tuple[int, int, int, int]  # Z, M, K, N
    result: tuple[int, ...]
    dtype: DType
    bits: int  # of an element of the operands

    def compute(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of the operands' sources."""
        batch, m, k, n = self.sizes
        matrix = shape.reshape(self.left.move(a), shape=self.left.folded[1:])
        matrix = shape.permute(matrix, axes=(1, 0)) if self.left.turned else matrix
        joined = put_side_by_side(shape.reshape(self.right.move(b), shape=(batch, k, n)))
        # Blocks of the product are not those of the batch: its results are memory.
        found = basic.fusion_barrier(contractions.matmul(matrix, joined, dtype=self.dtype))
        found = shape.reshape(found, shape=(m, batch, n))
        return shape.reshape(shape.permute(found, axes=(1, 0, 2)), shape=self.result)

    def estimate_seconds(self) -> float:
        """The time of the copy of the batch, of the product and of the copy of its results."""
        batch, m, k, n = self.sizes
        waves = ceil_divide(ceil_divide(m, COLUMNS) * ceil_divide(batch * n, COLUMNS), BUSY_PROGRAMS)
        computed = 2 * waves * BUSY_PROGRAMS * COLUMNS * COLUMNS * k
        moved = 2 * batch * n * (k * self.bits + m * self.dtype.bits) // 8
        return computed / (SMALL_BLOCK_RATE * BF16_RATE) + moved / ROWS_RATE + 2 * COPY_SECONDS


def match_chunked_product(
    uses: UseDef, left: Value, right: Value, out: DType | None = None, wave_blocks: bool = False
) -> ChunkedProduct | JoinedProduct | None:
    """The product of two operands cut along its contraction or with copied operands, or None where neither pays.

    `out` is the type of the results; None: that of the operands. `wave_blocks`: a product by one launch has the blocks
    whose waves take the least time (`LoweringPlan.wave_blocks`).
    """
    measured, dtype = measure_product(left, right), get_tensor_type(left).dtype
    out = out or dtype
    if measured is None or out not in RESULT_TYPES.get(dtype, ()):
        return None
    sides, (batch, m, k, n) = (find_operand(uses, left), find_operand(uses, right)), measured[0]
    if dtype in SCALAR_TYPES:
        if not (find_narrow_type(uses, left) or find_narrow_type(uses, right)):
            return _chunk_scalars(*sides, *measured, dtype)
        before = find_narrow_sides(uses, *sides)
        if before is None:
            return None
        sides, dtype = before, get_tensor_type(before[0].source).dtype
    narrow = dtype.bits == 8  # both operands along the contraction
    turns = (narrow and sides[0].turned, narrow and not sides[1].turned)
    copies = tuple(OperandCopy(side.folded, dtype, turn) for side, turn in zip(sides, turns, strict=True))
    few = m < WAVE_ROWS  # products that are bound by reading the right operand
    if few and not copies[1].needed and (sides[1].moves or uses.get(sides[1].source) is not None):
        return None  # what is computed is better not written first
    rows, columns = 64 if m <= 64 else 128, FEW_COLUMNS if n <= FEW_COLUMNS else COLUMNS
    programs = batch * ceil_divide(m, rows) * ceil_divide(n, columns)
    chunks = max(1, min(BUSY_PROGRAMS // programs, k // LEAST_DEPTH))
    each = ROUND_BYTES * 8 // dtype.bits
    found = ChunkedProduct(*sides, *measured, out, copies, rows, columns, chunks, each)  # type: ignore[arg-type]
    if any(copy.needed for copy in copies):
        return (_join_batch(found) or _widen_blocks(found)) if _copies_pay(found) else None
    if chunks == 1 and not few:
        return _fill_waves(found, wave_blocks)
    if wave_blocks and m >= WARPGROUP_SIDE // 2 and n >= WARPGROUP_SIDE:
        if _estimate_whole(found, BLOCK_RATES) < WHOLE_GAIN * _estimate_parts(found):
            return None
    return found if _pays(m, k, n, chunks, sides[1].turned) else None


def match_deep_product(
    uses: UseDef, left: Value, right: Value, out: DType, plan: LoweringPlan
) -> ChunkedProduct | None:
    """The product of two stored operands cut along its contraction, where it has fewer blocks than a processor runs.

    Smaller blocks would pack the rows and columns that they share again. Packing pairs of 16-bit elements, or columns
    that end within a register, takes long.
    """
    measured, dtype = measure_product(left, right), get_tensor_type(left).dtype
    if measured is None or out not in RESULT_TYPES.get(dtype, ()):
        return None
    (batch, m, k, n), sides = measured[0], (find_operand(uses, left), find_operand(uses, right))
    packs = dtype in (bf16, f16) or (dtype == f32 and n % LANES and n <= DEEP_COLUMNS)
    if m < LEAST_DEEP_ROWS or n < LEAST_DEEP_COLUMNS or not packs:
        return None
    (rows, above), (columns, beside) = _divide_side(m, DEEP_ROWS, 4), _divide_side(n, DEEP_COLUMNS, LANES)
    chunks = min(plan.programs // (batch * above * beside), k // DEEP_PART)
    computed = any((node := uses.get(side.source)) is not None and node.op.pointwise for side in sides)
    padded = rows * above * columns * beside > MOST_PADDING * m * round_up(n, LANES)
    if computed or padded or chunks < LEAST_PARTS:
        return None
    copies = tuple(OperandCopy(side.folded, dtype, False, aligns=False) for side in sides)
    each = _divide_side(ceil_divide(k, chunks), plan.k, DEEP_ROUND)[0]
    return ChunkedProduct(*sides, *measured, out, copies, rows, columns, chunks, each)  # type: ignore[arg-type]


def _divide_side(size: int, most: int, multiple: int) -> tuple[int, int]:
    """The length of the fewest equal parts of at most so many elements, a multiple of a number, and their number."""
    count = ceil_divide(size, most)
    return round_up(ceil_divide(size, count), multiple), count


def find_narrow_sides(
    uses: UseDef, left: ProductOperand, right: ProductOperand
) -> tuple[ProductOperand, ProductOperand] | None:
    """The operands before their casts from one 16-bit type, or None where they are no such casts."""
    found = [_find_narrow_operand(uses, side) for side in (left, right)]
    if found[0] is None or found[1] is None:
        return None
    same = get_tensor_type(found[0].source).dtype == get_tensor_type(found[1].source).dtype
    return (found[0], found[1]) if same else None


def _find_narrow_operand(uses: UseDef, side: ProductOperand) -> ProductOperand | None:
    """An operand as moves of the elements that it was cast from; a gather also needs its indices."""
    moves, value = [], side.source
    while (node := uses.get(value)) is not None and node.op in MOVES and len(node.args) == 1:
        moves.append(node)
        value = node.args[0]
    if node is None or node.op is not basic.cast or find_narrow_type(uses, value) is None:
        return None
    return replace(side, source=node.args[0], moves=tuple(reversed(moves)))


def _fill_waves(product: ChunkedProduct, wave_blocks: bool) -> ChunkedProduct | None:
    """The product in so many parts that the last wave of programs leaves less of a GPU idle, where that pays."""
    _, _, k, n = product.sizes
    if k < LONG_DEPTH or n < COLUMNS or k * n < LEAST_ELEMENTS:
        return None
    whole = _estimate_whole(product, BLOCK_RATES if wave_blocks else LARGE_BLOCKS)
    widths = (COLUMNS, MORE_COLUMNS)
    tried = [(c, columns) for c in range(2, min(MOST_PARTS, k // LEAST_DEPTH) + 1) for columns in widths]
    times = {(c, columns): _estimate_parts(replace(product, chunks=c, columns=columns)) for c, columns in tried}
    chunks, columns = min(times, key=times.__getitem__)
    return replace(product, chunks=chunks, columns=columns) if times[chunks, columns] < WAVE_GAIN * whole else None


def _estimate_whole(product: ChunkedProduct, blocks: Collection[tuple[int, int]]) -> float:
    """The time of a product by one launch, with those of the blocks that take the least."""
    return min(_estimate_parts(replace(product, rows=m, columns=n, chunks=1)) for m, n in blocks)


def _estimate_parts(product: ChunkedProduct) -> float:
    """The time of a product in parts: waves of programs, and the launch that adds the parts up."""
    (batch, m, k, n), chunks = product.sizes, product.chunks
    added = 8 * chunks * batch * m * n / MEMORY_RATE + COPY_SECONDS if chunks > 1 else 0.0
    sizes, block = (batch * chunks, m, ceil_divide(k, chunks), n), (product.rows, product.columns)
    return estimate_waves(sizes, block, BUSY_PROGRAMS, product.right.turned) * STEP_SECONDS + added


def _chunk_scalars(
    left: ProductOperand, right: ProductOperand, sizes: tuple[int, int, int, int], result: tuple[int, ...], dtype: DType
) -> ChunkedProduct | None:
    """A product of f32 or f64 cut along its contraction, where it has few blocks of results; f64 in any case."""
    batch, m, k, n = sizes
    rows = min(SCALAR_ROWS, max(8, 1 << (m - 1).bit_length()))
    columns = min(SCALAR_ELEMENTS // rows, MORE_COLUMNS if dtype == f32 else COLUMNS)
    programs = batch * ceil_divide(m, rows) * ceil_divide(n, columns)
    chunks = min(SCALAR_PROGRAMS // programs, k // SCALAR_DEPTH)
    if min(m, n) == 1 or k < LONG_SCALAR_DEPTH or chunks < LEAST_PARTS:
        if dtype != f64 or min(m, n) < LEAST_DOUBLES or k < LEAST_DOUBLES:
            return None
        chunks = 1  # blocks of which two are on a multiprocessor: one loads while the other multiplies
    copies = tuple(OperandCopy(side.folded, dtype, False, aligns=False) for side in (left, right))
    return ChunkedProduct(left, right, sizes, result, dtype, copies, rows, columns, chunks, SCALAR_ROUND)  # type: ignore[arg-type]


def _widen_blocks(product: ChunkedProduct) -> ChunkedProduct:
    """The product with larger blocks, where these fill a GPU, too."""
    batch, m, _, n = product.sizes
    programs = batch * ceil_divide(m, product.rows) * ceil_divide(n, MORE_COLUMNS)
    return replace(product, columns=MORE_COLUMNS) if programs >= BUSY_PROGRAMS and n > COLUMNS else product


def _join_batch(product: ChunkedProduct) -> JoinedProduct | None:
    """The product as one of two matrices, where its rows are short and both copies cost less than what blocks waste."""
    (batch, m, k, n), (left, right) = product.sizes, product.copies
    if left.needed or left.sizes[0] > 1 or right.turns or product.right.turned or batch * n % right.unit:
        return None
    blocks = batch * ceil_divide(m, product.rows) * product.rows * ceil_divide(n, product.columns) * product.columns
    rate = BF16_RATE * (FEW_COLUMNS_RATE if product.columns == FEW_COLUMNS else SMALL_BLOCK_RATE)
    joined = JoinedProduct(product.left, product.right, product.sizes, product.result, product.dtype, right.dtype.bits)
    apart = 2 * blocks * k / rate + right.bytes / COPY_RATE + COPY_SECONDS
    return joined if joined.estimate_seconds() < apart else None


def _copies_pay(product: ChunkedProduct) -> bool:
    """Whether copies of operands and a product of what they write take less time than a product without tensor maps."""
    (batch, m, k, n), copied = product.sizes, [copy for copy in product.copies if copy.needed]
    if min(m, n) == 1:
        return False  # a reduction, which reads the matrix once
    programs = batch * ceil_divide(m, product.rows) * ceil_divide(n, product.columns)
    operations = 2 * batch * m * k * n
    left_idle = max(1.0, BUSY_PROGRAMS / programs)
    unmapped = operations / UNMAPPED_RATE * left_idle
    moved = sum(copy.bytes for copy in copied) / COPY_RATE
    added = 8 * product.chunks * batch * m * n / MEMORY_RATE + COPY_SECONDS if product.chunks > 1 else 0.0
    computed = 2 * batch * round_up(m, product.rows) * k * round_up(n, product.columns)
    mapped = computed / BF16_RATE * max(1.0, left_idle / product.chunks)
    return mapped + moved + added + len(copied) * COPY_SECONDS < unmapped


def _pays(m: int, k: int, n: int, chunks: int, turned: bool) -> bool:
    if min(k, n) < COLUMNS or k * n < LEAST_ELEMENTS:
        return False
    if m == 1 and turned:
        return False  # sums along rows of memory, which reductions read as fast
    return m <= FEW_ROWS or (chunks > 1 and k >= LONG_DEPTH)
