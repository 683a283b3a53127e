"""Operand copies: operands of products written once more, in rows that tensor maps load (inductor's padding).

A tensor map needs rows of whole units of 16 bytes, and products of 8-bit elements both operands along the contraction.
Other operands are copied first, with zeros up to such a unit, and transposed where the product needs that: one pass
over memory, which large products win back many times.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import DType, TensorType
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import shape

# mypy: disable-error-code="operator, attr-defined, index"

ROW_BYTES = 16  # of which rows that a tensor map loads are multiples
COPIED_ELEMENTS, COPIED_COLUMNS = 2048, 256  # of the block that a program copies
TURNED = 64  # rows and columns of the block that a program transposes


@kernel
def copy_rows(x, out, *, BR, BC):
    """out [R, C'] = x [R, C] with zeros after C, on the grid (blocks of R, blocks of C')."""
    i, j = tile.program_id(0) * BR, tile.program_id(1) * BC
    tile.store(out[i : i + BR, j : j + BC], tile.load(x[i : i + BR, j : j + BC], edge="clip"), edge="clip")


@kernel
def copy_turned(x, out, *, B):
    """out [Z, C, R'] = x [Z, R, C] transposed, with zeros after R, on the grid (Z, blocks of R', blocks of C)."""
    z, i, j = tile.program_id(0), tile.program_id(1) * B, tile.program_id(2) * B
    turned = tile.alloc_shared((B, B), x.dtype)  # read in the order of the stores
    tile.store(turned[:, :], tile.transpose(tile.load(x[z, i : i + B, j : j + B], edge="clip")))
    tile.store(out[z, j : j + B, i : i + B], tile.load(turned[:, :]), edge="clip")


@kernel
def copy_side_by_side(x, out, *, BR, BC):
    """out [R, Z, C] = x [Z, R, C], on the grid (Z, blocks of R, blocks of C)."""
    z, i, j = tile.program_id(0), tile.program_id(1) * BR, tile.program_id(2) * BC
    tile.store(out[i : i + BR, z, j : j + BC], tile.load(x[z, i : i + BR, j : j + BC], edge="clip"), edge="clip")


def put_side_by_side(x: Tensor) -> Tensor:
    """Matrices [Z, R, C] as one of their rows side by side, [R, Z · C]."""
    batch, rows, columns = (int(n) for n in x.shape)
    width = min(COPIED_COLUMNS, 1 << (columns - 1).bit_length())
    height = COPIED_ELEMENTS // width
    grid = batch, ceil_divide(rows, height), ceil_divide(columns, width)
    out = OutputMemory(TensorType((rows, batch, columns), x.dtype))
    return shape.reshape(launch(copy_side_by_side, grid, x, out, BR=height, BC=width), shape=(rows, batch * columns))


@dataclass(frozen=True)
class OperandCopy:
    """How an operand [Z, R, C] gets to a product: as it is, in longer rows, or transposed."""

    sizes: tuple[int, int, int]
    dtype: DType
    turns: bool  # whether the copy is transposed
    aligns: bool = True  # whether its rows are whole units

    @property
    def unit(self) -> int:
        """The elements of which the length of a row is a multiple."""
        return ROW_BYTES * 8 // self.dtype.bits

    @property
    def needed(self) -> bool:
        """Whether there is a copy at all."""
        return self.turns or (self.aligns and self.sizes[-1] % self.unit != 0)

    @property
    def bytes(self) -> int:
        """The bytes that the copy reads and writes."""
        batch, rows, columns = self.sizes
        return 2 * batch * rows * columns * self.dtype.bits // 8 if self.needed else 0

    def apply(self, x: Tensor) -> Tensor:
        """The operand [Z, R, C] as [Z, R, C'] or, transposed, as [Z, C, R']."""
        batch, rows, columns = self.sizes
        if not self.needed:
            return x
        if self.turns:
            out = OutputMemory(TensorType((batch, columns, round_up(rows, self.unit)), self.dtype))
            grid = batch, ceil_divide(round_up(rows, self.unit), TURNED), ceil_divide(columns, TURNED)
            return launch(copy_turned, grid, x, out, B=TURNED)
        wide = round_up(columns, self.unit)
        out = OutputMemory(TensorType((batch * rows, wide), self.dtype))
        width = min(COPIED_COLUMNS, 1 << (wide - 1).bit_length())
        height = COPIED_ELEMENTS // width
        blocks = ceil_divide(batch * rows, height), ceil_divide(wide, width)
        flat = shape.reshape(x, shape=(batch * rows, columns))
        return shape.reshape(launch(copy_rows, blocks, flat, out, BR=height, BC=width), shape=(batch, rows, wide))
