"""Running sums and products: scans of rows and columns by a tree over chunks with a carry (Blelloch 1990).

Where there are few rows, an axis is scanned in parts side by side: the sums of the parts come first, and their running
sums are what each part starts from. The tree depends on the sizes alone.
"""

from __future__ import annotations

from typing import Any

from tessera.core.symbolic_dim import Size, ceil_divide
from tessera.core.types import DType, TensorType, int32, int64
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import reduce
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.bits import bitcast
from tessera.ops.tensor.rearrange import narrow
from tessera.ops.tensor.shape import pad, reshape
from tessera.stdlib.row_scans import find_neutral, join

# mypy: disable-error-code="operator, attr-defined, index"

CHUNK = 2048  # elements of the block of a program
LANES = 32  # columns of a program
PART_CHUNKS = 4  # the least chunks of a part
PROGRAMS = 528  # that keep a GPU busy
WALKED_LANES, WALKING_PROGRAMS = 64, 1056  # of so many programs each walks its columns, which fills a GPU
STEP = 8  # rows that a program loads together
REDUCTIONS = {"sum": reduce.sum, "prod": reduce.prod, "max": reduce.max, "min": reduce.min}


def pick_one(pairs, which):
    """The elements of pairs that a mask names, one of each pair: as the largest bits, which keep -0 and NaN."""
    bits = bitcast(pairs, int64 if pairs.dtype.bits == 64 else int32) if pairs.dtype.is_float else pairs
    least = find_neutral("max", bits.dtype)
    found = tile.max(tile.where(which, bits, least), axis=2, keepdims=True)
    return bitcast(found, pairs.dtype) if pairs.dtype.is_float else found


def find_pairs(x, combine):
    """The pairs of a block [A, n, B] along its middle axis: the block folded, the first and second elements, both
    combined, and where the first are."""
    rows, size, columns = x.shape
    pairs = tile.reshape(x, (rows, size // 2, 2, columns))
    first = tile.broadcast(tile.reshape(tile.arange(0, 2), (1, 1, 2, 1)) == 0, pairs.shape)
    early, late = pick_one(pairs, first), pick_one(pairs, ~first)
    both = tile.sum(pairs, axis=2, keepdims=True) if combine == "sum" else join(early, late, combine)
    return pairs, early, late, both, first


def scan_before(x, start, combine, neutral, reverse):
    """For each element of a block [A, n, B] `start` [A, 1, B] and those before it combined; and all combined.

    With `reverse` the elements after one come before it.
    """
    rows, size, columns = x.shape
    if size == 1:
        return start, x
    pairs, early, late, both, first = find_pairs(x, combine)
    before, total = scan_before(tile.reshape(both, (rows, size // 2, columns)), start, combine, neutral, reverse)
    other = tile.where(first, late, neutral) if reverse else tile.where(first, neutral, early)
    found = join(tile.reshape(before, (rows, size // 2, 1, columns)), other, combine)
    return tile.reshape(found, x.shape), total


def scan_up_to(x, start, combine, neutral, reverse):
    """For each element of a block [A, n, B], n a power of two, `start` and those up to it combined; and all."""
    rows, size, columns = x.shape
    if size == 1:
        return join(start, x, combine), x
    pairs, early, late, both, first = find_pairs(x, combine)
    before, total = scan_before(tile.reshape(both, (rows, size // 2, columns)), start, combine, neutral, reverse)
    own = tile.where(first, both, pairs) if reverse else tile.where(first, pairs, both)
    found = join(tile.reshape(before, (rows, size // 2, 1, columns)), own, combine)
    return tile.reshape(found, x.shape), total


@kernel
def scan_rows(x, starts, out, *, state, rows, chunk, length, parts, combine, neutral, reverse, initial, exclusive):
    """out = the running sums or products of x [R, N] along its rows, from `initial` on, in type `state`.

    The grid is (ceil(R / rows), parts). A part has `length` elements, a multiple of `chunk`; if there are several, part
    p of row r starts from starts[r, p]. `exclusive`: of the elements before each one.
    """
    row, begin = tile.program_id(0) * rows, tile.program_id(1) * length
    start = tile.full((rows, 1, 1), initial, state)
    if parts > 1:
        given = tile.load(starts[row : row + rows, tile.program_id(1) : tile.program_id(1) + 1], edge="clip")
        start = tile.reshape(given, (rows, 1, 1))
    end = tile.minimum(begin + length, x.shape[1])
    for at in tile.range(begin, end, chunk):
        first = begin + (end - 1 - at) // chunk * chunk if reverse else at
        block = tile.cast(tile.load(x[row : row + rows, first : first + chunk], other=neutral), state)
        block = tile.reshape(block, (rows, chunk, 1))
        if exclusive:
            found, total = scan_before(block, start, combine, neutral, reverse)
        else:
            found, total = scan_up_to(block, start, combine, neutral, reverse)
        found = tile.cast(tile.reshape(found, (rows, chunk)), out.dtype)
        tile.store(out[row : row + rows, first : first + chunk], found, edge="clip")
        start = join(start, total, combine)


@kernel
def scan_columns(
    x, starts, out, *, state, lanes, chunk, length, parts, combine, neutral, reverse, initial, exclusive
):  # fmt: skip
    """out = the running sums or products of x [L, N, R] along its middle axis, on the grid (L, parts, ceil(R / lanes)).

    As `scan_rows`; what the parts start from is [L, parts, R].
    """
    lead, part, lane = tile.program_id(0), tile.program_id(1), tile.program_id(2) * lanes
    start = tile.full((1, 1, lanes), initial, state)
    if parts > 1:
        start = tile.reshape(tile.load(starts[lead, part, lane : lane + lanes], edge="clip"), (1, 1, lanes))
    begin, end = part * length, tile.minimum(part * length + length, x.shape[1])
    for at in tile.range(begin, end, chunk):
        first = begin + (end - 1 - at) // chunk * chunk if reverse else at
        block = tile.load(x[lead, first : first + chunk, lane : lane + lanes], other=neutral)
        block = tile.reshape(tile.cast(block, state), (1, chunk, lanes))
        if exclusive:
            found, total = scan_before(block, start, combine, neutral, reverse)
        else:
            found, total = scan_up_to(block, start, combine, neutral, reverse)
        found = tile.cast(tile.reshape(found, (chunk, lanes)), out.dtype)
        tile.store(out[lead, first : first + chunk, lane : lane + lanes], found, edge="clip")
        start = join(start, total, combine)


@kernel
def walk_columns(x, out, *, state, lanes, combine, reverse, initial, exclusive):
    """As `scan_columns`, one row after the other from `initial` on, on the grid (L, ceil(R / lanes)).

    The rows of a step are loaded before they are combined.
    """
    lead, lane, size = tile.program_id(0), tile.program_id(1) * lanes, x.shape[1]
    total = tile.full((lanes,), initial, state)
    for at in tile.range(0, size // STEP * STEP, STEP):
        total = walk_rows(x, out, total, (lead, lane, at), STEP, state, combine, reverse, exclusive)
    if size % STEP:
        rest = (lead, lane, size // STEP * STEP)
        total = walk_rows(x, out, total, rest, size % STEP, state, combine, reverse, exclusive)


def walk_rows(x, out, total, place, count, state, combine, reverse, exclusive):
    """The running sums of some rows, and what comes after them."""
    lead, lane, at = place
    lanes, rows = total.shape[0], [at + i for i in range(count)]
    rows = [x.shape[1] - 1 - row for row in rows] if reverse else rows
    given = [tile.cast(tile.load(x[lead, row, lane : lane + lanes], edge="clip"), state) for row in rows]
    for row, value in zip(rows, given):  # noqa: B905  # of the same length
        after = join(total, value, combine)
        found = tile.cast(total if exclusive else after, out.dtype)
        tile.store(out[lead, row, lane : lane + lanes], found, edge="clip")
        total = after
    return total


def running_sums(
    x: Tensor, state: DType, dtype: DType, combine: str = "sum", reverse: bool = False, initial: Any = None
) -> Tensor:
    """The running sums of `x` [L, N, R] along its middle axis, in `state` and rounded to `dtype`.

    `combine` may be "prod", "max" or "min", too; with `reverse` from the last element on. With `initial` they are
    exclusive ones: of that number and the elements before each one.

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
    neutral, exclusive = find_neutral(combine, x.dtype), initial is not None
    kind = {"combine": combine, "neutral": neutral, "reverse": reverse, "exclusive": exclusive}
    kind["initial"] = initial if exclusive else neutral
    starts = _find_starts(x, state, length, parts, combine, reverse, initial) if parts > 1 else None
    if not _is_symbolic(x) and _fills_with_columns(int(lead), int(width)):
        across = int(lead), ceil_divide(int(width), WALKED_LANES)
        kind.pop("neutral")
        memory = OutputMemory(TensorType(x.shape, dtype))
        return launch(walk_columns, across, x, memory, state=state, lanes=WALKED_LANES, **kind)
    if width != 1:
        memory, grid = OutputMemory(TensorType(x.shape, dtype)), (lead, parts, ceil_divide(width, lanes))
        numbers = {"state": state, "lanes": lanes, "chunk": chunk, "length": length, "parts": parts, **kind}
        return launch(scan_columns, grid, x, starts, memory, **numbers)
    flat, memory = reshape(x, shape=(lead, size)), OutputMemory(TensorType((lead, size), dtype))
    numbers = {"state": state, "rows": rows, "chunk": chunk, "length": length, "parts": parts, **kind}
    starts = reshape(starts, shape=(lead, parts)) if starts is not None else None
    return reshape(launch(scan_rows, (ceil_divide(lead, rows), parts), flat, starts, memory, **numbers), shape=x.shape)


def _fills_with_columns(lead: int, width: int) -> bool:
    """Whether programs of `WALKED_LANES` columns, most of them full, fill a GPU."""
    return width >= WALKED_LANES // 2 and lead * ceil_divide(width, WALKED_LANES) >= WALKING_PROGRAMS


def _is_symbolic(x: Tensor) -> bool:
    return not all(isinstance(n, int) for n in x.shape)


def _fit_power_of_two(size: Size, most: int) -> int:
    """The least power of two that holds a size, at most `most`, which it is for a symbolic size."""
    return min(most, 1 << (size - 1).bit_length()) if isinstance(size, int) else most


def _find_starts(
    x: Tensor, state: DType, length: int, parts: int, combine: str, reverse: bool, initial: Any = None
) -> Any:
    """What each part starts from [L, parts, R]: what the parts before it give."""
    lead, size, width = (int(n) for n in x.shape)
    neutral = find_neutral(combine, x.dtype)
    wide = pad(cast(x, dtype=state), low=(0, 0, 0), high=(0, parts * length - size, 0), value=neutral)
    whole = REDUCTIONS[combine](reshape(wide, shape=(lead, parts, length, width)), axis=2)
    ended = running_sums(narrow(whole, 1, int(reverse), parts - 1 + int(reverse)), state, state, combine, reverse)
    low, high = (0, int(not reverse), 0), (0, int(reverse), 0)
    starts = pad(ended, low=low, high=high, value=neutral)
    return starts if initial is None else starts * initial if combine == "prod" else starts + initial
