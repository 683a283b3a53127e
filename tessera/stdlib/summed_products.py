"""Sums of products of matrices, as the gradient of the weights of a 1x1 convolution: each program adds up the products
of several matrices in one accumulator, so that no product of one of them is in memory (CUTLASS's batched split K, whose
slices are the matrices)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import DType, TensorType, bf16, f16, f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Node
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.ops.tensor import basic, contractions, reduce, shape
from tessera.stdlib.gemm import zero_accumulator
from tessera.stdlib.operand_copies import OperandCopy
from tessera.stdlib.split_k import COLUMNS, FEW_COLUMNS, MORE_COLUMNS, ROUND_BYTES, find_narrow_sides
from tessera.stdlib.split_products import BUSY_PROGRAMS, ProductOperand, find_operand, measure_product

# mypy: disable-error-code="operator, attr-defined, index"

LEAST_MATRICES, LEAST_SIZE = 4, 16  # of a sum; rows and columns of its result
MOST_DEPTH = 4096  # a deeper product fills a GPU by itself, cut along its contraction
LEAST_OPERATIONS = 1 << 26
WIDE_PADDING = 1.0  # columns of wide blocks in relation to those of narrow ones, up to which they pay
LOADS_RATE = 120  # products of two elements in the time of a load from the L2 cache: 600 TFLOP/s, 5 TB/s of 2 bytes


@kernel
def multiply_together(a, b, out, *, turned_a, turned_b, together, BM, BN, BK):
    """out [S, M, N] = for each s the sum of the products of the matrices s · together to (s + 1) · together.

    On the grid (S, blocks of M, blocks of N). `a` is [Z, M, K], or [Z, K, M] if turned; likewise `b`.
    """
    part, i, j = tile.program_id(0), tile.program_id(1) * BM, tile.program_id(2) * BN
    depth = a.shape[1] if turned_a else a.shape[2]
    total = zero_accumulator(a, (BM, BN))
    if depth <= BK:
        for z in tile.range(part * together, tile.minimum(part * together + together, a.shape[0]), 1):
            total = total + multiply_round(a, b, z, i, j, 0, turned_a, turned_b, BM, BN, BK)
    else:  # a nest of constant bounds is one pipelined loop; behind the last matrix there are zeros
        for z in tile.range(0, together, 1):
            for k in tile.range(0, depth, BK):
                total = total + multiply_round(a, b, part * together + z, i, j, k, turned_a, turned_b, BM, BN, BK)
    tile.store(out[part, i : i + BM, j : j + BN], total, edge="clip")


def multiply_round(a, b, z, i, j, k, turned_a, turned_b, BM, BN, BK):
    """The product of the elements k to k + BK of the contraction of one pair of matrices."""
    if turned_a:
        left = tile.transpose(tile.load(a[z, k : k + BK, i : i + BM], edge="clip"))
    else:
        left = tile.load(a[z, i : i + BM, k : k + BK], edge="clip")
    if turned_b:
        right = tile.transpose(tile.load(b[z, j : j + BN, k : k + BK], edge="clip"))
    else:
        right = tile.load(b[z, k : k + BK, j : j + BN], edge="clip")
    return tile.dot(left, right)


@dataclass(frozen=True)
class SummedBlocks:
    """The blocks of a result [M, N], or where they are `swapped` of its transpose, which is a product as well."""

    m: int
    n: int
    swapped: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows and columns of what is computed."""
        return (self.n, self.m) if self.swapped else (self.m, self.n)

    @property
    def rows(self) -> int:
        """The rows of a block."""
        return 64 if self.sizes[0] <= 64 else 128

    @property
    def columns(self) -> int:
        """The columns of a block: wide ones where they are filled, since blocks of 128 x 128 wait for the L2 cache."""
        n = self.sizes[1]
        if n <= COLUMNS:
            return FEW_COLUMNS if n <= FEW_COLUMNS else COLUMNS
        wide = round_up(n, MORE_COLUMNS) <= WIDE_PADDING * round_up(n, COLUMNS)
        return MORE_COLUMNS if wide and self.rows > 64 else COLUMNS

    @property
    def grid(self) -> tuple[int, int]:
        """How many blocks there are along each axis."""
        return ceil_divide(self.sizes[0], self.rows), ceil_divide(self.sizes[1], self.columns)

    def count_loads(self) -> float:
        """The elements of rows and columns that all blocks load, but at least what they multiply costs."""
        (m, n), (across, down) = self.sizes, self.grid
        return max(down * m + across * n, across * self.rows * down * self.columns / LOADS_RATE)


def choose_blocks(m: int, n: int) -> SummedBlocks:
    """The blocks of a result [M, N] that load the fewest elements."""
    return min((SummedBlocks(m, n), SummedBlocks(m, n, True)), key=SummedBlocks.count_loads)


@dataclass(frozen=True)
class SummedProduct:
    """The sum of the products [Z, M, K] · [Z, K, N] over Z."""

    left: ProductOperand
    right: ProductOperand
    sizes: tuple[int, int, int, int]  # Z, M, K, N
    result: tuple[int, ...]
    dtype: DType
    source: DType  # of the operands

    def compute(self, a: Tensor, b: Tensor) -> Tensor:
        """The sum for the operands' sources."""
        (batch, m, _, n), sides = self.sizes, (self.left, self.right)
        copies = [OperandCopy(side.folded, self.source, False) for side in sides]
        moved = [shape.reshape(side.move(x), shape=side.folded) for side, x in zip(sides, (a, b), strict=True)]
        a, b = (copy.apply(x) for copy, x in zip(copies, moved, strict=True))
        blocks = choose_blocks(m, n)
        together = ceil_divide(batch, max(1, min(batch, BUSY_PROGRAMS // math.prod(blocks.grid))))
        parts = ceil_divide(batch, together)
        turned = self.left.turned, self.right.turned
        if blocks.swapped:
            (a, b), (m, n), turned = (b, a), (n, m), (not turned[1], not turned[0])
        memory = OutputMemory(TensorType((parts, m, n), f32))
        constants = {"turned_a": turned[0], "turned_b": turned[1], "together": together}
        tiles = {"BM": blocks.rows, "BN": blocks.columns, "BK": ROUND_BYTES * 8 // self.source.bits}
        sums = launch(multiply_together, (parts, *blocks.grid), a, b, memory, **constants, **tiles)
        total = basic.cast(reduce.sum(sums, axis=(0,), keepdims=False), dtype=self.dtype)
        return shape.reshape(shape.permute(total, axes=(1, 0)) if blocks.swapped else total, shape=self.result)


def match_summed_product(uses: UseDef, node: Node) -> SummedProduct | None:
    """A sum over all matrices of a product of 16-bit floats, or None where that is another sum, or does not pay."""
    dot, out = uses.find(node.args[0], contractions.dot), get_tensor_type(node.out)
    if dot is None or uses.count_uses(dot.out) > 1 or get_tensor_type(dot.out).dtype != f32:
        return None
    if any(t.policy is not None for t in (out, *(get_tensor_type(v) for v in (*dot.args, dot.out)))):
        return None
    rank, measured = len(get_shape(dot.out)), measure_product(*dot.args)
    leading = tuple(sorted(a % rank for a in node.attrs["axis"]))
    if measured is None or not _sums_matrices(leading, get_shape(dot.out)):
        return None
    (batch, m, k, n), _ = measured
    if batch < LEAST_MATRICES or min(m, n) < LEAST_SIZE or k > MOST_DEPTH or batch * m * k * n < LEAST_OPERATIONS:
        return None
    sides = find_operand(uses, dot.args[0]), find_operand(uses, dot.args[1])
    dtype = get_tensor_type(dot.args[0]).dtype
    found = find_narrow_sides(uses, *sides) if dtype == f32 else sides if dtype in (bf16, f16) else None
    if found is None or any(side.folded[0] != batch for side in found):
        return None
    result = tuple(int(s) for s in get_shape(node.out))
    return SummedProduct(*found, measured[0], result, out.dtype, get_tensor_type(found[0].source).dtype)


def _sums_matrices(axes: tuple[int, ...], sizes: tuple[Any, ...]) -> bool:
    """Whether a sum is over all axes before the last two, but for those of one element."""
    return all(i in axes or sizes[i] == 1 for i in range(len(sizes) - 2)) and all(a < len(sizes) - 2 for a in axes)
