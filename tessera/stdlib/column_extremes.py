"""Column extremes: the places of minima or maxima along an outer axis in one pass over memory.

A program holds a block of rows and columns, of each element the best so far and its place, and compares one block after
the other with it, so that threads exchange nothing until the end. Few columns are divided into parts of the axis.
"""

from __future__ import annotations

from tessera.core.symbolic_dim import ceil_divide, symbol_names
from tessera.core.types import TensorType, bool_, int32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Node
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_tensor_type
from tessera.ops.tensor import elementwise, reduce
from tessera.ops.tensor.shape import reshape
from tessera.stdlib.row_scans import find_neutral

# mypy: disable-error-code="operator, attr-defined, index"

BLOCK, COLUMNS = 2048, 256  # elements and columns of the block of a program, at most
PROGRAMS = 528  # that keep a GPU busy
LEAST_ROUNDS = 8  # of a part


def is_better(x, best, lowest):
    """Where elements come before the best so far: they are lower, or higher; NaN comes before all numbers."""
    better = x < best if lowest else x > best
    return better | ((x != x) & (best == best)) if x.dtype.is_float else better


@kernel
def find_column_places(x, values, places, *, rows, columns, length, neutral, lowest):
    """values and places [L, P, R] = the extremes of parts of `length` elements of x [L, N, R] along its middle axis.

    On the grid (L, P, blocks of R). Of equal elements the first counts.
    """
    lead, part, lane = tile.program_id(0), tile.program_id(1), tile.program_id(2) * columns
    row = tile.broadcast(tile.cast(tile.arange(0, rows), "int32")[:, None], (rows, columns))
    begin = part * length
    best = tile.full((rows, columns), neutral, x.dtype)
    place = row + tile.cast(begin, "int32")
    for at in tile.range(begin, tile.minimum(begin + length, x.shape[1]), rows):
        block = tile.load(x[lead, at : at + rows, lane : lane + columns], other=neutral)
        better = is_better(block, best, lowest)
        best = tile.where(better, block, best)
        place = tile.where(better, row + tile.cast(at, "int32"), place)
    found = tile.min(best, axis=0, keepdims=True) if lowest else tile.max(best, axis=0, keepdims=True)
    equal = best == found
    if x.dtype.is_float:
        equal = equal | ((best != best) & (found != found))
    first = tile.min(tile.where(equal, place, 2147483647), axis=0)
    tile.store(values[lead, part, lane : lane + columns], tile.reshape(found, (columns,)), edge="clip")
    tile.store(places[lead, part, lane : lane + columns], first, edge="clip")


def find_outer_axis(node: Node) -> int | None:
    """The axis along which a node finds places, while elements of another one are adjacent; or None."""
    type, axis = get_tensor_type(node.args[0]), node.attrs["axis"]
    sizes = type.shape
    if axis is None or symbol_names(sizes) or 0 in sizes or type.policy is not None:
        return None
    at, last = axis % len(sizes), max((i for i, n in enumerate(sizes) if n != 1), default=0)
    whole = int(sizes[at]) < 1 << 31 and type.dtype.bits >= 8 and type.dtype != bool_
    return at if whole and at != last else None


def find_extreme_places(x: Tensor, axis: int, lowest: bool) -> Tensor:
    """The places of the minima, or maxima, of a tensor along an axis, without that axis, in int32."""
    sizes = tuple(int(n) for n in x.shape)
    lead, size, width = _fold(sizes, axis)
    columns = min(COLUMNS, 1 << (width - 1).bit_length())
    rows = min(BLOCK // columns, 1 << (size - 1).bit_length())
    programs = lead * ceil_divide(width, columns)
    parts = max(1, min(PROGRAMS // programs, size // (LEAST_ROUNDS * rows)))
    length = ceil_divide(ceil_divide(size, parts), rows) * rows
    parts = ceil_divide(size, length)
    constants = {"rows": rows, "columns": columns, "length": length, "lowest": lowest}
    neutral = find_neutral("min" if lowest else "max", x.dtype)
    memories = [OutputMemory(TensorType((lead, parts, width), dtype)) for dtype in (x.dtype, int32)]
    grid = lead, parts, ceil_divide(width, columns)
    folded = reshape(x, shape=(lead, size, width))
    values, places = launch(find_column_places, grid, folded, *memories, neutral=neutral, **constants)
    if parts > 1:
        extreme = reduce.min if lowest else reduce.max
        best = extreme(values, axis=(1,), keepdims=True)
        # Where there is NaN, it is the extreme.
        found = elementwise.where(
            elementwise.equal(best, best), elementwise.equal(values, best), elementwise.not_equal(values, values)
        )
        places = reduce.min(elementwise.where(found, places, size), axis=(1,), keepdims=False)
    return reshape(places, shape=sizes[:axis] + sizes[axis + 1 :])


def _fold(sizes: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    """The elements before an axis, along it and after it."""
    lead, width = 1, 1
    for n in sizes[:axis]:
        lead *= n
    for n in sizes[axis + 1 :]:
        width *= n
    return lead, sizes[axis], width
