"""Program ids and ranges: the tile's index in the grid and in its group, and what a `for` iterates over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import ArgumentError, UnknownNameError, UnsupportedSyntaxError
from tessera.core.symbolic_dim import Size
from tessera.core.types import int64
from tessera.frontend.kernel.memref import load_if_memref
from tessera.frontend.kernel.tile_api.blocks import arange
from tessera.frontend.kernel.trace import Index, add_indices, current_trace, emit_op, is_traced
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import tile
from tessera.ops.tensor.basic import full

# Ranges: what a `for` iterates over while the kernel runs, and ranges unrolled while compiling.


@dataclass(frozen=True)
class TileRange:
    """From `lower` to before `upper` by `step`; `wrap` makes what the loop variable is of the number."""

    lower: Index
    upper: Index
    step: Index = 1
    wrap: Callable[[Any], Any] = lambda i: i

    def static(self) -> list[Any]:
        """The numbers, where they are known while compiling.

        Raises:
            UnsupportedSyntaxError: they are not.
        """
        bounds = (self.lower, self.upper, self.step)
        if any(is_traced(b) for b in bounds):
            raise UnsupportedSyntaxError(
                "this needs a range known while compiling", suggestion="use a for loop over the range"
            )
        return [self.wrap(i) for i in range(*bounds)]  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return iter(self.static())

    def __reversed__(self) -> Any:
        """The same numbers, the last one first: they are known while compiling, or one apart."""
        if not any(is_traced(b) for b in (self.lower, self.upper, self.step)):
            numbers = range(self.lower, self.upper, self.step)[::-1]  # type: ignore[arg-type]
            return TileRange(numbers.start, numbers.stop, numbers.step, self.wrap)
        if is_traced(self.step) or self.step != 1:
            raise UnsupportedSyntaxError(
                "a range with a step is reversed where its bounds are known",
                suggestion="count down: tile.range(last, first - 1, -step)",
            )
        return TileRange(self.upper - 1, self.lower - 1, -1, self.wrap)  # type: ignore[operator]

    def __len__(self) -> int:
        return len(self.static())


def cdiv(x: Any, y: Any) -> Any:
    """`x / y` rounded up: the number of blocks of `y` elements that cover `x`; of integers, in kernels and outside.

    >>> cdiv(1000, 128)
    8
    """
    return (load_if_memref(x) + (y - 1)) // y


@dataclass(frozen=True)
class BlockIndex:
    """The number of a block along an axis, and how many elements a block has."""

    index: Index
    size: int

    @property
    def start(self) -> Index:
        """The first element of the block."""
        return self.index * self.size  # type: ignore[operator,return-value]


def tile_range(*bounds: Any) -> TileRange:
    """range(stop), range(start, stop) or range(start, stop, step), walked while the kernel runs."""
    found = [load_if_memref(b) for b in bounds]
    for bound in found:
        if isinstance(bound, float) or (isinstance(bound, Tensor) and (bound.ndim or not bound.dtype.is_integer)):
            raise ArgumentError(
                "the bounds of a range are not integer scalars",
                received=str(bound.type) if isinstance(bound, Tensor) else repr(bound),
            )
    if not 1 <= len(found) <= 3:
        raise ArgumentError(f"a range takes 1 to 3 bounds, not {len(found)}")
    lower, upper, step = (0, *found, 1) if len(found) == 1 else (*found, 1)[:3]
    if not is_traced(step) and step == 0:
        raise ArgumentError("the step of a range is 0")
    return TileRange(lower, upper, step)


def range_n(shape: Any, size: int, *, axis: int = -2, prefetch: int = 0) -> TileRange:
    """The blocks of `size` elements along an axis of a shape (the rows), or of that many elements.

    `prefetch` is a hint: how many blocks to load ahead.
    """
    total = shape if not isinstance(shape, (tuple, list)) else shape[axis] if len(shape) > 1 else shape[0]
    return TileRange(0, add_indices(total, size - 1) // size, 1, lambda i: BlockIndex(i, size))  # type: ignore[operator]


def static_range(*bounds: int) -> range:
    """A range unrolled while compiling."""
    return range(*bounds)


# Program ids: the tile's index in the grid and in its group, and the sizes of both.


WARP_SIZE = 32
# A kernel that asks for one of these is meant for a group of tiles (`choose_launch` in specialisation.py).
GROUP_IDS = frozenset({"local_id", "group_size", "thread_id", "warp_id", "warp", "cooperative_group"})
THREAD_IDS = frozenset({"thread_id", "lane_id", "warp_id", "warp"})
GRID_IDS = frozenset({"program_id", "linear_id", "group_id", "block_id", "row_index", "lane_id"})
# A kernel that asks for one of these may serve any grid.
GRID_COUNT_IDS = frozenset({"num_programs", "grid_size"})


def program_id(axis: int = 0) -> Tensor:
    """This program's place along an axis of the grid."""
    current_trace("tile.program_id")
    return emit_op(tile.program_id, [], axis=axis)


def num_programs(axis: int = 0) -> Size:
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
