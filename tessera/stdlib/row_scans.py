"""Row scans: running sums and products, and products of rows, in one pass over memory, in the kernel language.

A program walks its rows from the first element to the last and carries what it has so far. Along an axis that is not
the last each lane has a row of its own.
"""

from __future__ import annotations

import math

from tessera.core.symbolic_dim import ceil_divide
from tessera.core.types import DType, f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import TensorType
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.reduce import find_neutral_element
from tessera.ops.tensor.shape import permute, reshape

# mypy: disable-error-code="operator, attr-defined, index"

ROWS = 4  # rows that a program walks element by element
LANES = 256  # rows that a program walks side by side
MIN_SIDE_BY_SIDE = (
    16  # rows from which on the extremes of transposed rows take less time: a comparison waits for the last
)
CHUNK = 64  # elements of a row that a program multiplies side by side


LONG_ROW = 1 << 16  # f32 elements from which on rounding each of the sums in f32 would lose a digit more


@kernel
def scan_rows(x, out, *, combine, neutral, carried):
    """out[r, i] = x[r, 0] … x[r, i] combined in the type `carried`, on the grid (ceil(R / 4),).

    A program walks four rows, whose chains of additions overlap: the last row in the place of those that do not exist,
    so that no access needs a mask.
    """
    r, last = tile.program_id(0) * 4, x.shape[0] - 1
    s, t, u = tile.minimum(r + 1, last), tile.minimum(r + 2, last), tile.minimum(r + 3, last)
    first = tile.cast(neutral, carried)
    a, b, c, d = first, first, first, first
    for i in tile.range(0, x.shape[1], 1):
        a = extend(x, out, r, i, a, combine)
        b = extend(x, out, s, i, b, combine)
        c = extend(x, out, t, i, c, combine)
        d = extend(x, out, u, i, d, combine)


def join(one, other, combine):
    """Two blocks of one type combined: "sum", "prod", "max" or "min"."""
    if combine in ("max", "min"):
        return tile.maximum(one, other) if combine == "max" else tile.minimum(one, other)
    return one + other if combine == "sum" else one * other


def find_neutral(combine, dtype):
    """What leaves every number unchanged: -0 in a sum, since 0 changes it."""
    if combine in ("sum", "prod"):
        return 1 if combine == "prod" else -0.0 if dtype.is_float else 0
    return find_neutral_element(combine, dtype)


def extend(x, out, row, i, before, combine):
    """One more element of a row."""
    total = join(before, tile.cast(x[row, i], before.dtype), combine)
    out[row, i] = tile.cast(total, out.dtype)
    return total


@kernel
def scan_columns(x, out, *, combine, neutral, BC: int = LANES):
    """out[l, i, c] = x[l, 0, c] … x[l, i, c] combined, on the grid (L, ceil(C / BC))."""
    lead, first = tile.program_id(0), tile.program_id(1) * BC
    before = tile.full((BC,), neutral, out.dtype)
    for i in tile.range(0, x.shape[1], 1):
        each = tile.cast(tile.load(x[lead, i, first : first + BC], edge="clip"), out.dtype)
        before = join(before, each, combine)
        tile.store(out[lead, i, first : first + BC], before, edge="clip")


@kernel
def multiply_rows(x, out, *, rows, chunk):
    """out[r, 0] = the product of row r of x [R, N], on the grid (ceil(R / rows),).

    Each of the `chunk` lanes of a row multiplies every chunk-th element, and a tree the lanes.
    """
    first = tile.program_id(0) * rows
    total = tile.full((rows, chunk), 1, out.dtype)
    for i in tile.range(0, x.shape[1], chunk):
        total = total * tile.cast(tile.load(x[first : first + rows, i : i + chunk], other=1), out.dtype)
    tile.store(out[first : first + rows, 0:1], tile.reduce(total, "prod", axis=1, keepdims=True), edge="clip")


def multiply_axis(x: Tensor, wide: DType) -> Tensor:
    """The products [R, 1] of the rows of `x` [R, N], multiplied in the type `wide`."""
    count = x.shape[0]
    memory = OutputMemory(TensorType((count, 1), wide))
    return launch(multiply_rows, (ceil_divide(count, ROWS),), x, memory, rows=ROWS, chunk=CHUNK)


def scan_axis(x: Tensor, axis: int, combine: str, wide: DType) -> Tensor:
    """The running results of `combine` (`join`) along an axis, accumulated in the type `wide`."""
    sizes = x.shape
    lead, count, rest = math.prod(sizes[:axis]), sizes[axis], math.prod(sizes[axis + 1 :])
    neutral = find_neutral(combine, wide)
    if rest == 1 and wide.is_float and combine in ("max", "min") and isinstance(lead, int) and lead >= MIN_SIDE_BY_SIDE:
        columns = permute(reshape(x, shape=(lead, count)), axes=(1, 0))
        return reshape(permute(scan_axis(columns, 0, combine, wide), axes=(1, 0)), shape=sizes)
    if rest == 1:
        memory, rows = OutputMemory(TensorType((lead, count), wide)), reshape(x, shape=(lead, count))
        long = wide == f32 and isinstance(count, int) and count >= LONG_ROW and combine == "sum"
        how = {"combine": combine, "neutral": neutral, "carried": "f64" if long else str(wide)}
        found = launch(scan_rows, (ceil_divide(lead, ROWS),), rows, memory, **how)
    else:
        memory, rows = OutputMemory(TensorType((lead, count, rest), wide)), reshape(x, shape=(lead, count, rest))
        lanes = rest if isinstance(rest, int) and rest < LANES else LANES
        found = launch(
            scan_columns, (lead, ceil_divide(rest, lanes)), rows, memory, combine=combine, neutral=neutral, BC=lanes
        )
    return reshape(found, shape=sizes)
