"""Where a tile stands: in the grid, in its group; and how large both are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.kernel.trace import Index, current, emit
from tessera.ops import tile
from tessera.ops.basic import full
from tessera.tensor import Tensor
from tessera.types import int64

LANES = 32
# A kernel that asks for one of these is meant for a group of tiles (see defaults.py).
GROUP_IDS = frozenset({"local_id", "group_size", "thread_id", "warp_id", "warp", "cooperative_group"})
GRID_IDS = frozenset({"program_id", "linear_id", "group_id", "block_id", "row_index", "lane_id"})


def program_id(axis: int = 0) -> Tensor:
    """This program's place along an axis of the grid."""
    current("tile.program_id")
    return emit(tile.program_id, [], axis=axis)


def num_programs(axis: int = 0) -> int:
    """The number of programs along an axis of the grid: a constant, since kernels are compiled for their grid."""
    grid = current("tile.num_programs").grid
    return grid[axis] if axis < len(grid) else 1


grid_size = num_programs


def local_id() -> Tensor:
    """This tile's place in its group."""
    current("tile.local_id")
    return emit(tile.local_id, [])


def group_size() -> int:
    """The number of tiles in a group: a constant, since kernels are compiled for their group."""
    return current("tile.group_size").group


def group_id() -> Any:
    """The place of this tile's group among all groups, counted through the grid."""
    grid = current("tile.group_id").grid
    total: Any = program_id(0)
    for axis in range(1, len(grid)):
        total = total * grid[axis] + program_id(axis)
    return total


def linear_id() -> Any:
    """The place of this tile among all tiles of all groups."""
    group = current("tile.linear_id").group
    return group_id() * group + local_id() if group > 1 else group_id()


def lane_id() -> Any:
    """This tile's place in its warp of 32."""
    return local_id() % LANES  # type: ignore[operator]


def warp_id() -> Any:
    """The warp of 32 tiles this tile is in."""
    return local_id() // LANES  # type: ignore[operator]


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
    trace = current()
    places = [trace.axes.index(str(d)) if str(d) in trace.axes else None for d in dims]
    found = places[axis] if any(p is not None for p in places) else axis
    if found is None or found >= len(trace.grid) or trace.grid[found] == 1:
        return 0
    start = program_id(found)
    return start if size == 1 else start * size  # type: ignore[operator,return-value]
