"""Split K: products of 16-bit floats with few results, cut along the contraction until they fill a GPU (CUTLASS).

A product gives each block of results to one program. Few rows or columns leave most of a GPU idle, or make blocks too
small for warpgroup products. So the blocks stay large, also where rows are fewer, and each is computed by several
programs, over parts of the contraction. Their sums, in f32, are added up in the order of the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import DType, TensorType, f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_tensor_type
from tessera.ops.tensor import basic, reduce, shape
from tessera.stdlib.split_products import ALIGNMENT, BUSY_PROGRAMS, ProductOperand, find_operand, measure_product

# mypy: disable-error-code="operator, attr-defined, index"

COLUMNS, DEPTH = 128, 64  # of a block of results, and of the elements that a round contracts
LEAST_DEPTH = 512  # elements of a part of the contraction
FEW_ROWS = 15  # products of so many rows are bound by memory
LEAST_ELEMENTS = 1 << 20  # of the right operand, for the launch that adds up to pay
LONG_DEPTH = 2048  # contractions that are cut where rows are many


@kernel
def multiply_chunks(a, b, out, *, turned_a, turned_b, depth, BM, BN, BK):
    """out [S, Z, M, N] = for each s the product over the elements s · depth to (s + 1) · depth of the contraction.

    On the grid (S · Z, blocks of M, blocks of N). `a` is [Z or 1, M, K], or [Z or 1, K, M] if turned; likewise `b`.
    """
    chunk, z = tile.program_id(0) // out.shape[1], tile.program_id(0) % out.shape[1]
    i, j, first = tile.program_id(1) * BM, tile.program_id(2) * BN, chunk * depth
    za, zb = z % a.shape[0], z % b.shape[0]
    total = tile.zeros((BM, BN), "f32")
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
    rows: int  # of a block of results
    chunks: int

    def compute(self, a: Tensor, b: Tensor) -> Tensor:
        """The product of the operands' sources."""
        batch, m, k, n = self.sizes
        a, b = (shape.reshape(x, shape=side.folded) for x, side in ((a, self.left), (b, self.right)))
        dtype = f32 if self.chunks > 1 else self.dtype
        memory = OutputMemory(TensorType((self.chunks, batch, m, n), dtype))
        grid = self.chunks * batch, ceil_divide(m, self.rows), ceil_divide(n, COLUMNS)
        constants = {"turned_a": self.left.turned, "turned_b": self.right.turned}
        blocks = {"depth": round_up(ceil_divide(k, self.chunks), DEPTH), "BM": self.rows, "BN": COLUMNS, "BK": DEPTH}
        sums = launch(multiply_chunks, grid, a, b, memory, **constants, **blocks)
        if self.chunks > 1:
            sums = basic.cast(reduce.sum(sums, axis=(0,), keepdims=False), dtype=self.dtype)
        return shape.reshape(sums, shape=self.result)


def match_chunked_product(uses: UseDef, left: Value, right: Value) -> ChunkedProduct | None:
    """The product of two operands cut along its contraction, or None where that does not pay."""
    measured = measure_product(left, right)
    if measured is None:
        return None
    sides, (batch, m, k, n) = (find_operand(uses, left), find_operand(uses, right)), measured[0]
    if any(side.folded[-1] % ALIGNMENT for side in sides) or uses.get(sides[1].source) is not None:
        return None  # tensor maps want rows of whole units of 16 bytes; what is computed is better not written first
    rows = 64 if m <= 64 else 128
    programs = batch * ceil_divide(m, rows) * ceil_divide(n, COLUMNS)
    chunks = max(1, min(BUSY_PROGRAMS // programs, k // LEAST_DEPTH))
    if not _pays(m, k, n, chunks, sides[1].turned):
        return None
    return ChunkedProduct(*sides, *measured, get_tensor_type(left).dtype, rows, chunks)


def _pays(m: int, k: int, n: int, chunks: int, turned: bool) -> bool:
    if min(k, n) < COLUMNS or k * n < LEAST_ELEMENTS:
        return False
    if m == 1 and turned:
        return False  # sums along rows of memory, which reductions read as fast
    return m <= FEW_ROWS or (chunks > 1 and k >= LONG_DEPTH)
