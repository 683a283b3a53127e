"""Warps, blocks and cooperative groups: stretches of tiles that reduce, vote and exchange values together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tessera.errors import ArgumentError
from tessera.kernel.copies import barrier, grid_barrier
from tessera.kernel.ids import LANES, linear_id, local_id
from tessera.kernel.trace import as_index, as_value, current, emit
from tessera.ops import group, reduce
from tessera.ops.elementwise import bitwise_xor, equal, less, shift_left, where
from tessera.ops.shape import iota, reshape
from tessera.tensor import Tensor
from tessera.types import int64

BITS = 64  # of the masks that ballot and match give
_REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": reduce.sum, "max": reduce.max, "min": reduce.min}


class Stretch:
    """`size` tiles side by side (None: the whole group). All of them must call each method together.

    Values are scalars or blocks; each element is treated by itself. A group smaller than `size` is one stretch.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size

    def width(self) -> int:
        """The number of tiles of a stretch in this kernel's group.

        Raises:
            ArgumentError: the group is not made up of such stretches.
        """
        whole = current("tile.warp").group
        width = whole if self.size is None else min(self.size, whole)
        if whole % width:
            raise ArgumentError(
                f"a group of {whole} tiles is not made up of stretches of {width}",
                expected=f"a group size divisible by {width}", suggestion="launch it with another group size",
            )  # fmt: skip
        return width

    def rank(self) -> Tensor:
        """This tile's place in its stretch."""
        return local_id() % self.width()  # type: ignore[operator]

    def sync(self) -> None:
        """Wait for the tiles of this stretch; what they wrote before is then seen by all of them."""
        if self.size is None:
            barrier()
        else:
            width = self.width()
            current("tile.warp").builder.add(group.meet, [], {"width": width})

    def reduce(self, x: Any, op: str = "sum") -> Tensor:
        """The "sum", "max" or "min" of what the tiles hold, in all of them; sums of narrow integers give int64."""
        rule = _REDUCTIONS.get(op)
        if rule is None:
            raise ArgumentError(f'"{op}" is not a reduction', expected=", ".join(_REDUCTIONS))
        seen = self._collected(x)
        return rule(seen, axis=-seen.ndim)

    def reduce_sum(self, x: Any) -> Tensor:
        """The sum of what the tiles hold."""
        return self.reduce(x, "sum")

    def reduce_max(self, x: Any) -> Tensor:
        """The largest of what the tiles hold."""
        return self.reduce(x, "max")

    def reduce_min(self, x: Any) -> Tensor:
        """The smallest of what the tiles hold."""
        return self.reduce(x, "min")

    def all(self, condition: Any) -> Tensor:
        """Whether a condition holds in every tile."""
        return self.reduce(condition, "min")

    def any(self, condition: Any) -> Tensor:
        """Whether a condition holds in some tile."""
        return self.reduce(condition, "max")

    def ballot(self, condition: Any) -> Tensor:
        """The tiles in which a condition holds, as the bits of an int64: bit i is the i-th tile's."""
        return self._bits(self._collected(condition))

    def match(self, x: Any) -> Tensor:
        """The tiles that hold the same value as this one, as the bits of an int64."""
        seen = self._collected(x)
        return self._bits(equal(seen, as_value(x)))

    def shuffle(self, x: Any, lane_id: Any) -> Tensor:
        """What the tile at place `lane_id` (modulo the stretch) holds; each tile may name another."""
        return emit(group.exchange, [as_value(x), as_index(lane_id)], width=self.width())

    def broadcast(self, x: Any, src_thread: Any = 0) -> Tensor:
        """What the tile at place `src_thread` holds, in all of them."""
        return self.shuffle(x, src_thread)

    def butterfly(self, x: Any, mask: Any) -> Tensor:
        """What the tile holds whose place is this one's with the bits of `mask` flipped."""
        return self.shuffle(x, bitwise_xor(self.rank(), mask))

    def shuffle_up(self, x: Any, delta: Any = 1) -> Tensor:
        """What the tile `delta` places before holds; the first ones keep their own."""
        source = self.rank() - delta
        return self.shuffle(x, where(less(source, 0), self.rank(), source))

    def shuffle_down(self, x: Any, delta: Any = 1) -> Tensor:
        """What the tile `delta` places after holds; the last ones keep their own."""
        source = self.rank() + delta
        return self.shuffle(x, where(less(source, self.width()), source, self.rank()))

    def _collected(self, x: Any) -> Tensor:
        return emit(group.collect, [as_value(x)], width=self.width())

    def _bits(self, seen: Tensor) -> Tensor:
        if self.width() > BITS:
            raise ArgumentError(f"a mask has {BITS} bits, these are {self.width()} tiles", expected="a warp")
        lanes = reshape(iota(shape=(self.width(),), dtype=int64), shape=(self.width(),) + (1,) * (seen.ndim - 1))
        return reduce.sum(where(seen, shift_left(1, lanes), 0), axis=-seen.ndim)


class Grid:
    """Every tile of every group of the launch."""

    def sync(self) -> None:
        """`tile.grid_barrier()`."""
        grid_barrier()

    def rank(self) -> Any:
        """`tile.linear_id()`."""
        return linear_id()

    def width(self) -> int:
        """The number of tiles of the launch."""
        trace = current("tile.grid")
        return math.prod(trace.grid) * trace.group


warp = Stretch(LANES)
block = Stretch()
grid = Grid()


def cooperative_group(size: int) -> Stretch:
    """The stretch of `size` tiles that this tile is in."""
    if not isinstance(size, int) or size < 1:
        raise ArgumentError("the size of a cooperative group is a constant of at least 1", received=repr(size))
    return Stretch(size)
