"""Program ids: where a tile stands in the grid and in its group, and the block sizes of the tile configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tessera.core.errors import UnknownNameError
from tessera.core.types import int64
from tessera.frontend.kernel.tile_api.blocks import arange
from tessera.frontend.kernel.tile_api.ranges import BlockIndex
from tessera.frontend.kernel.trace import Index, current_trace, emit_op
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import tile
from tessera.ops.tensor.basic import full

# Where a tile stands: in the grid, in its group; and how large both are.


WARP_SIZE = 32
# A kernel that asks for one of these is meant for a group of tiles (see defaults.py).
GROUP_IDS = frozenset({"local_id", "group_size", "thread_id", "warp_id", "warp", "cooperative_group"})
GRID_IDS = frozenset({"program_id", "linear_id", "group_id", "block_id", "row_index", "lane_id"})


def program_id(axis: int = 0) -> Tensor:
    """This program's place along an axis of the grid."""
    current_trace("tile.program_id")
    return emit_op(tile.program_id, [], axis=axis)


def num_programs(axis: int = 0) -> int:
    """The number of programs along an axis of the grid: a constant, since kernels are compiled for their grid."""
    grid = current_trace("tile.num_programs").grid
    return grid[axis] if axis < len(grid) else 1


grid_size = num_programs


def local_id() -> Tensor:
    """This tile's place in its group."""
    current_trace("tile.local_id")
    return emit_op(tile.local_id, [])


def group_size() -> int:
    """The number of tiles in a group: a constant, since kernels are compiled for their group."""
    return current_trace("tile.group_size").group


def group_id() -> Any:
    """The place of this tile's group among all groups, counted through the grid."""
    grid = current_trace("tile.group_id").grid
    total: Any = program_id(0)
    for axis in range(1, len(grid)):
        total = total * grid[axis] + program_id(axis)
    return total


def linear_id() -> Any:
    """The place of this tile among all tiles of all groups."""
    group = current_trace("tile.linear_id").group
    return group_id() * group + local_id() if group > 1 else group_id()


def lane_id() -> Any:
    """This tile's place in its warp of 32."""
    return local_id() % WARP_SIZE  # type: ignore[operator]


def warp_id() -> Any:
    """The warp of 32 tiles this tile is in."""
    return local_id() // WARP_SIZE  # type: ignore[operator]


def thread_id() -> tuple[Tensor, Tensor, Tensor]:
    """This tile's place in its group as three coordinates, the last two 0."""
    zero = full(shape=(), value=0, dtype=int64)
    return local_id(), zero, zero


def block_id() -> tuple[Tensor, ...]:
    """This program's place in the grid as three coordinates."""
    return tuple(program_id(axis) for axis in range(3))


def axis_start(axis: int, dims: Sequence[Any], size: int) -> Index:
    """Where this program's block of `size` elements begins along an axis of a tensor with such dims.

    Where the tensor has a dim that the grid walks, its axes go with the grid axes of the same names;
    otherwise with those of the same numbers. Along any other axis the block begins at 0.
    """
    trace = current_trace()
    places = [trace.axes.index(str(d)) if str(d) in trace.axes else None for d in dims]
    found = places[axis] if any(p is not None for p in places) else axis
    if found is None or found >= len(trace.grid) or trace.grid[found] == 1:
        return 0
    start = program_id(found)
    return start if size == 1 else start * size  # type: ignore[operator,return-value]


_DIMENSION_NAMES = {"m": 0, "n": 1, "k": 2, "d": 2}
_SCHEDULE_HINTS = {"vector": 1, "stages": 1, "prefetch": 0}


class TileContext:
    """Block sizes: .M .N .K (also .m .n .k, and .d for the third) from `tile_shape`.

    A constant of the kernel goes before that, and where `tile_shape` says nothing the dim of that name.
    """

    def __init__(self, tile_shape: tuple[int, ...], constants: Mapping[str, Any]) -> None:
        self.tile_shape = tile_shape
        self.constants = constants

    def __getattr__(self, name: str) -> Any:
        place = _DIMENSION_NAMES.get(name.lower())
        if place is not None and place < len(self.tile_shape):
            return self.tile_shape[place]
        for known in (self.constants, _SCHEDULE_HINTS):
            if name in known:
                return known[name]
        raise UnknownNameError(
            f"the tile context has no `{name}`",
            expected="M, N, K (or m, n, d) and the kernel's constants",
            received=f"tile_shape={self.tile_shape}",
            suggestion="@kernel(tile_shape=(64, 64, 64))",
        )


def context() -> TileContext:
    """The tile configuration of this kernel."""
    trace = current_trace("tile.context")
    return TileContext(trace.tile_shape, trace.constants)


def row_index() -> Any:
    """The rows of this program's block, by the last axis of the grid and the first block size."""
    trace = current_trace("tile.row_index")
    size = context().m
    return arange(0, size) + program_id(len(trace.grid) - 1) * size  # type: ignore[operator]


def col_index(block: Any = 0) -> Any:
    """The columns of a block (a BlockIndex or a number), each of the second block size."""
    found = block if isinstance(block, BlockIndex) else BlockIndex(block, context().n)
    return arange(0, found.size) + found.start  # type: ignore[operator]
