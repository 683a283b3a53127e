"""Row products: products of a few rows, which are bound by the bytes of the other matrix (BLAS's GEMV).

A block of the matrix is read once, multiplied by each row, and added up element by element; the threads exchange sums
only at the end. The contraction is cut until the blocks fill a GPU, and the parts are added up in order. No row needs
an alignment, and f32 is multiplied as f32.
"""

from __future__ import annotations

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
from tessera.ops.tensor import basic, reduce, shape
from tessera.stdlib.split_products import ProductOperand, find_operand, measure_product

# mypy: disable-error-code="operator, attr-defined, index"

MOST_ROWS = 2
COLUMNS, DEPTH = 256, 32  # of the block of a round, for one row
LEAST_ELEMENTS = 1 << 18  # of the matrix
PROGRAMS = 1056  # that hide the latency of memory: eight on each multiprocessor
LEAST_DEPTH = 128  # elements of a part of the contraction
MAPPED_UNIT = 16  # bytes of which rows are multiples that tensor maps load


@kernel
def multiply_rows(a, b, out, *, depth, BM, BN, BK):
    """out [S, Z, M, N] = for each s the product over the elements s · depth to (s + 1) · depth of the contraction.

    On the grid (S, Z, blocks of N), for a [Z, M, K] of at most BM rows, and b [Z or 1, K, N].
    """
    chunk, z, j = tile.program_id(0), tile.program_id(1), tile.program_id(2) * BN
    first, zb = chunk * depth, z % b.shape[0]
    total = tile.zeros((BM, BK, BN), "f32")
    for k in tile.range(first, tile.minimum(first + depth, b.shape[1]), BK):
        rows = tile.cast(tile.load(a[z, 0:BM, k : k + BK], edge="clip"), "f32")
        block = tile.cast(tile.load(b[zb, k : k + BK, j : j + BN], edge="clip"), "f32")
        total = total + rows[:, :, None] * block[None, :, :]
    tile.store(out[chunk, z, 0:BM, j : j + BN], tile.cast(tile.sum(total, axis=1), out.dtype), edge="clip")


@dataclass(frozen=True)
class RowProduct:
    """A product [Z, M, K] · [Z, K, N] of few rows."""

    left: Value
    right: ProductOperand
    sizes: tuple[int, int, int, int]  # Z, M, K, N
    result: tuple[int, ...]
    dtype: DType

    @property
    def depth(self) -> int:
        """The elements of a part of the contraction."""
        batch, _, k, n = self.sizes
        parts = max(1, min(PROGRAMS // (batch * ceil_divide(n, COLUMNS)), k // LEAST_DEPTH))
        return round_up(ceil_divide(k, parts), DEPTH)

    def compute(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of the left operand and the right one's source."""
        batch, m, k, n = self.sizes
        rows = 1 << (m - 1).bit_length()
        parts = ceil_divide(k, self.depth)
        memory = OutputMemory(TensorType((parts, batch, m, n), f32 if parts > 1 else self.dtype))
        a, b = shape.reshape(a, shape=(batch, m, k)), shape.reshape(b, shape=self.right.folded)
        blocks = {"depth": self.depth, "BM": rows, "BN": COLUMNS, "BK": DEPTH // rows}
        sums = launch(multiply_rows, (parts, batch, ceil_divide(n, COLUMNS)), a, b, memory, **blocks)
        if parts > 1:
            sums = basic.cast(reduce.sum(sums, axis=(0,), keepdims=False), dtype=self.dtype)
        return shape.reshape(sums, shape=self.result)


def match_row_product(uses: UseDef, left: Value, right: Value, out: DType | None = None) -> RowProduct | None:
    """The product of few rows and a matrix by rows, or None where another way is as fast.

    `out` is the type of the results; None: that of the operands.
    """
    measured, dtype = measure_product(left, right), get_tensor_type(left).dtype
    if measured is None or dtype not in (f32, bf16, f16) or measured[0][1] > MOST_ROWS:
        return None
    side, (_, _, k, n) = find_operand(uses, right), measured[0]
    mapped = dtype != f32 and n * dtype.bits // 8 % MAPPED_UNIT == 0
    if side.turned or mapped or uses.get(side.source) is not None or k * n < LEAST_ELEMENTS or n < COLUMNS:
        return None
    return RowProduct(left, side, *measured, out or dtype)
