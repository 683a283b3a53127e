"""Running sums: scans of rows and columns by a tree over chunks with a carry (Blelloch 1990), in the kernel language.

Where there are few rows, an axis is scanned in parts side by side: the sums of the parts come first, and their running
sums are what each part starts from. The tree depends on the sizes alone.
"""

from __future__ import annotations

from typing import Any

from tessera.core.symbolic_dim import Size, ceil_divide
from tessera.core.types import DType, TensorType
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import reduce
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.rearrange import narrow
from tessera.ops.tensor.shape import pad, reshape

# mypy: disable-error-code="operator, attr-defined, index"

CHUNK = 2048  # elements of the block of a program
LANES = 32  # columns of a program
PART_CHUNKS = 4  # the least chunks of a part
PROGRAMS = 528  # that keep a GPU busy


def find_pairs(x):
    """The pairs of a block [A, n, B] along its middle axis: the block folded, their sums, and where the first are."""
    rows, size, columns = x.shape
    pairs = tile.reshape(x, (rows, size // 2, 2, columns))
    first = tile.reshape(tile.arange(0, 2), (1, 1, 2, 1)) == 0
    return pairs, tile.sum(pairs, axis=2, keepdims=True), tile.broadcast(first, pairs.shape)


def sum_before(x, start):
    """For each element of a block [A, n, B] `start` [A, 1, B] and the sum of those before it; and the sum of all."""
    rows, size, columns = x.shape
    if size == 1:
        return start, x
    pairs, sums, first = find_pairs(x)
    before, total = sum_before(tile.reshape(sums, (rows, size // 2, columns)), start)
    earlier = tile.sum(tile.where(first, pairs, 0), axis=2, keepdims=True)
    found = tile.reshape(before, (rows, size // 2, 1, columns)) + tile.where(first, 0, earlier)
    return tile.reshape(found, x.shape), total


def sum_up_to(x, start):
    """For each element of a block [A, n, B], n a power of two, `start` and the sum up to it; and the sum of all."""
    rows, size, columns = x.shape
    if size == 1:
        return start + x, x
    pairs, sums, first = find_pairs(x)
    before, total = sum_before(tile.reshape(sums, (rows, size // 2, columns)), start)
    found = tile.reshape(before, (rows, size // 2, 1, columns)) + tile.where(first, pairs, sums)
    return tile.reshape(found, x.shape), total


@kernel
def scan_rows(x, starts, out, *, state, rows, chunk, length, parts):
    """out = the running sums of x [R, N] along its rows, in type `state`, on the grid (ceil(R / rows), parts).

    A part has `length` elements, a multiple of `chunk`; part p of row r starts from starts[r, p], if there are several.
    """
    row, begin = tile.program_id(0) * rows, tile.program_id(1) * length
    start = tile.full((rows, 1, 1), -0.0 if out.dtype.is_float else 0, state)
    if parts > 1:
        given = tile.load(starts[row : row + rows, tile.program_id(1) : tile.program_id(1) + 1], edge="clip")
        start = tile.reshape(given, (rows, 1, 1))
    for first in tile.range(begin, tile.minimum(begin + length, x.shape[1]), chunk):
        block = tile.cast(tile.load(x[row : row + rows, first : first + chunk], edge="clip"), state)
        found, total = sum_up_to(tile.reshape(block, (rows, chunk, 1)), start)
        found = tile.cast(tile.reshape(found, (rows, chunk)), out.dtype)
        tile.store(out[row : row + rows, first : first + chunk], found, edge="clip")
        start = start + total


@kernel
def scan_columns(x, starts, out, *, state, lanes, chunk, length, parts):
    """out = the running sums of x [L, N, R] along its middle axis, on the grid (L, parts, ceil(R / lanes)).

    As `scan_rows`; the sums that the parts start from are [L, parts, R].
    """
    lead, part, lane = tile.program_id(0), tile.program_id(1), tile.program_id(2) * lanes
    start = tile.full((1, 1, lanes), -0.0 if out.dtype.is_float else 0, state)
    if parts > 1:
        start = tile.reshape(tile.load(starts[lead, part, lane : lane + lanes], edge="clip"), (1, 1, lanes))
    for first in tile.range(part * length, tile.minimum(part * length + length, x.shape[1]), chunk):
        block = tile.cast(tile.load(x[lead, first : first + chunk, lane : lane + lanes], edge="clip"), state)
        found, total = sum_up_to(tile.reshape(block, (1, chunk, lanes)), start)
        found = tile.cast(tile.reshape(found, (chunk, lanes)), out.dtype)
        tile.store(out[lead, first : first + chunk, lane : lane + lanes], found, edge="clip")
        start = start + total


def running_sums(x: Tensor, state: DType, dtype: DType) -> Tensor:
    """The running sums of `x` [L, N, R] along its middle axis, added in `state` and rounded to `dtype`.

    Where a size is symbolic, the axis is one part.
    """
    lead, size, width = x.shape
    lanes = _fit_power_of_two(width, LANES)
    chunk = _fit_power_of_two(size, CHUNK // lanes)
    rows = _fit_power_of_two(lead, CHUNK // chunk) if width == 1 else 1
    parts, length = 1, ceil_divide(size, chunk) * chunk
    if isinstance(lead, int) and isinstance(size, int) and isinstance(width, int):
        programs = ceil_divide(lead, rows) * ceil_divide(width, lanes)
        parts = max(min(PROGRAMS // programs, size // (PART_CHUNKS * chunk)), 1)
        length = ceil_divide(ceil_divide(size, parts), chunk) * chunk
        parts = ceil_divide(size, length)
    starts = _find_starts(x, state, length, parts) if parts > 1 else x
    if width != 1:
        memory, grid = OutputMemory(TensorType(x.shape, dtype)), (lead, parts, ceil_divide(width, lanes))
        numbers = {"state": state, "lanes": lanes, "chunk": chunk, "length": length, "parts": parts}
        return launch(scan_columns, grid, x, starts, memory, **numbers)
    flat, memory = reshape(x, shape=(lead, size)), OutputMemory(TensorType((lead, size), dtype))
    numbers = {"state": state, "rows": rows, "chunk": chunk, "length": length, "parts": parts}
    starts = reshape(starts, shape=(lead, parts)) if parts > 1 else flat
    return reshape(launch(scan_rows, (ceil_divide(lead, rows), parts), flat, starts, memory, **numbers), shape=x.shape)


def _fit_power_of_two(size: Size, most: int) -> int:
    """The least power of two that holds a size, at most `most`, which it is for a symbolic size."""
    return min(most, 1 << (size - 1).bit_length()) if isinstance(size, int) else most


def _find_starts(x: Tensor, state: DType, length: int, parts: int) -> Any:
    """What each part starts from [L, parts, R]: the running sums of the parts before it."""
    lead, size, width = (int(n) for n in x.shape)
    wide = pad(cast(x, dtype=state), low=(0, 0, 0), high=(0, parts * length - size, 0), value=0)
    sums = reduce.sum(reshape(wide, shape=(lead, parts, length, width)), axis=2)
    ended = running_sums(narrow(sums, 1, 0, parts - 1), state, state)
    return pad(ended, low=(0, 1, 0), high=(0, 0, 0), value=-0.0 if state.is_float else 0)
