"""Row products: products of a few rows or columns, which are bound by the bytes of the other matrix (BLAS's GEMV).

A block of the matrix, by rows or transposed in memory, is read once, multiplied by each row, and added up element by
element; the threads exchange sums only at the end. The contraction is cut until the blocks fill a GPU, and the parts
are added up in order. No row needs an alignment, and f32 is multiplied as f32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import DType, TensorType, bf16, f16, f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_tensor_type
from tessera.lower.op_chains import strip_views
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import basic, contractions, reduce, shape
from tessera.stdlib.split_products import ProductOperand, find_operand, measure_product

# mypy: disable-error-code="operator, attr-defined, index"

MOST_ROWS = 2
COLUMNS, DEPTH = 256, 32  # of the block of a round, for one row
UNALIGNED_DEPTH = 16  # of such a block where a thread loads single elements: the registers of more programs
TURNED_ROWS, TURNED_DEPTH = 8, 256  # of that of a matrix that is transposed in memory
LEAST_TURNED, LEAST_TURNED_DEPTH = 1 << 22, 1024  # elements of such a matrix; shorter rows are one program's each
LEAST_ELEMENTS = 1 << 18  # of the matrix
PROGRAMS = 1056  # that hide the latency of memory: eight on each multiprocessor
LEAST_DEPTH = 128  # elements of a part of the contraction
MAPPED_UNIT = 16  # bytes of which rows of both operands are multiples that tensor maps load


@kernel
def multiply_rows(a, b, out, *, depth, BM, BN, BK):
    """out [S, Z, M, N] = for each s the product over the elements s · depth to (s + 1) · depth of the contraction.

    On the grid (blocks of N, Z, S), for a [Z, M, K] of at most BM rows, and b [Z or 1, K, N]: programs that run side by
    side read whole rows of b, which lie side by side in memory.
    """
    j, z, chunk = tile.program_id(0) * BN, tile.program_id(1), tile.program_id(2)
    first, zb = chunk * depth, z % b.shape[0]
    total = tile.zeros((BM, BK, BN), "f32")
    for k in tile.range(first, tile.minimum(first + depth, b.shape[1]), BK):
        rows = tile.cast(tile.load(a[z, 0:BM, k : k + BK], edge="clip"), "f32")
        block = tile.cast(tile.load(b[zb, k : k + BK, j : j + BN], edge="clip"), "f32")
        total = total + rows[:, :, None] * block[None, :, :]
    tile.store(out[chunk, z, 0:BM, j : j + BN], tile.cast(tile.sum(total, axis=1), out.dtype), edge="clip")


@kernel
def multiply_turned_rows(a, b, out, *, depth, BM, BN, BK):
    """As `multiply_rows` for b [Z or 1, N, K], on the grid (S, Z, blocks of N)."""
    chunk, z, j = tile.program_id(0), tile.program_id(1), tile.program_id(2) * BN
    first, zb = chunk * depth, z % b.shape[0]
    total = tile.zeros((BM, BN, BK), "f32")
    for k in tile.range(first, tile.minimum(first + depth, b.shape[2]), BK):
        rows = tile.cast(tile.load(a[z, 0:BM, k : k + BK], edge="clip"), "f32")
        block = tile.cast(tile.load(b[zb, j : j + BN, k : k + BK], edge="clip"), "f32")
        total = total + rows[:, None, :] * block[None, :, :]
    tile.store(out[chunk, z, 0:BM, j : j + BN], tile.cast(tile.sum(total, axis=2), out.dtype), edge="clip")


@dataclass(frozen=True)
class RowProduct:
    """A product [Z, M, K] · [Z, K, N] of few rows: `vectors` are these, or the columns of a product of few columns."""

    vectors: Value
    matrix: ProductOperand
    sizes: tuple[int, int, int, int]  # Z, M, K, N
    result: tuple[int, ...]
    dtype: DType
    columns: bool = False  # whether the product is the transpose of that of rows

    @property
    def block(self) -> tuple[int, int]:
        """The columns and the depth of the block of a round."""
        rows = 1 << (self.sizes[1] - 1).bit_length()
        if self.matrix.turned:
            return TURNED_ROWS // rows, TURNED_DEPTH
        bits = get_tensor_type(self.matrix.source).dtype.bits
        aligned = self.sizes[3] * bits // 8 % MAPPED_UNIT == 0
        return COLUMNS, (DEPTH if aligned else UNALIGNED_DEPTH) // rows

    @property
    def depth(self) -> int:
        """The elements of a part of the contraction."""
        batch, _, k, n = self.sizes
        wide, unit = self.block[0], self.block[1] if self.matrix.turned else DEPTH
        parts = max(1, min(PROGRAMS // (batch * ceil_divide(n, wide)), k // max(LEAST_DEPTH, unit)))
        return round_up(ceil_divide(k, parts), unit)

    def compute(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of the vectors and the matrix's source."""
        (batch, m, k, n), (wide, deep) = self.sizes, self.block
        rows = 1 << (m - 1).bit_length()
        parts = ceil_divide(k, self.depth)
        memory = OutputMemory(TensorType((parts, batch, m, n), f32 if parts > 1 else self.dtype))
        if self.columns and m > 1:
            a = shape.permute(shape.reshape(a, shape=(batch, k, m)), axes=(0, 2, 1))
        a, b = shape.reshape(a, shape=(batch, m, k)), shape.reshape(b, shape=self.matrix.folded)
        multiply = multiply_turned_rows if self.matrix.turned else multiply_rows
        grid, blocks = (parts, batch, ceil_divide(n, wide)), {"BM": rows, "BN": wide, "BK": deep}
        grid = grid if self.matrix.turned else grid[::-1]
        sums = launch(multiply, grid, a, b, memory, depth=self.depth, **blocks)
        if parts > 1:
            sums = basic.cast(reduce.sum(sums, axis=(0,), keepdims=False), dtype=self.dtype)
        if self.columns and m > 1:
            sums = shape.permute(shape.reshape(sums, shape=(batch, m, n)), axes=(0, 2, 1))
        return shape.reshape(sums, shape=self.result)


def match_row_product(uses: UseDef, left: Value, right: Value, out: DType | None = None) -> RowProduct | None:
    """The product of few rows, or columns, and a matrix, or None where another way is as fast.

    `out` is the type of the results; None: that of the operands.
    """
    measured, dtype = measure_product(left, right), get_tensor_type(left).dtype
    if measured is None or dtype not in (f32, bf16, f16):
        return None
    (batch, m, k, n), result = measured
    if min(m, n) > MOST_ROWS:
        return None
    columns = n < m
    matrix = find_operand(uses, left if columns else right)
    if columns:
        matrix, m, n = ProductOperand(matrix.source, not matrix.turned), n, m
    sizes, vectors = (batch, m, k, n), right if columns else left
    # Computed vectors are fused into reductions, which read a row of the matrix each as well.
    given = uses.get(strip_views(vectors, uses)) is None
    pays = given and _pays_turned(sizes) if matrix.turned else _pays(sizes, dtype)
    if not pays or not _lies_in_memory(uses, matrix.source):
        return None
    return RowProduct(vectors, matrix, sizes, result, out or dtype, columns)


def _lies_in_memory(uses: UseDef, value: Value) -> bool:
    """Whether a value is an argument, or what no reader computes again: the result of a product or a launch."""
    node = uses.get(strip_views(value, uses))
    return node is None or node.op in (contractions.dot, control_flow.launch)


def _pays(sizes: tuple[int, int, int, int], dtype: DType) -> bool:
    """Whether a block of rows of the matrix takes less time than products by tensor maps, and than a reduction."""
    _, _, k, n = sizes
    mapped = dtype != f32 and math.gcd(k, n) * dtype.bits // 8 % MAPPED_UNIT == 0
    return not mapped and k * n >= LEAST_ELEMENTS and n >= COLUMNS


def _pays_turned(sizes: tuple[int, int, int, int]) -> bool:
    """Whether programs of several rows take less time than a reduction of each row."""
    _, _, k, n = sizes
    return k >= LEAST_TURNED_DEPTH and n >= TURNED_ROWS and k * n >= LEAST_TURNED
