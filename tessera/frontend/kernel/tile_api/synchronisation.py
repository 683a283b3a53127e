"""Synchronisation: cooperative groups with reductions, votes and shuffles; mbarriers.

With mbarriers producers and consumers arrive and wait apart from each other, phase by phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tessera.core.errors import ArgumentError
from tessera.core.symbolic_dim import Size
from tessera.core.types import int64
from tessera.frontend.kernel.memref import MemRef, load_if_memref
from tessera.frontend.kernel.tile_api.ids import WARP_SIZE, linear_id, local_id
from tessera.frontend.kernel.tile_api.memory import alloc_shared, barrier, grid_barrier
from tessera.frontend.kernel.trace import as_index, as_value, current_trace, emit_op
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import mbarrier as ops
from tessera.ops.dialects import tile
from tessera.ops.tensor import reduce
from tessera.ops.tensor.elementwise import bitwise_xor, equal, less, shift_left, where
from tessera.ops.tensor.shape import iota, reshape

# Warps, blocks and cooperative groups: subgroups of tiles that reduce, vote and exchange values together.


BALLOT_BITS = 64  # of the masks that ballot and match give
_REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": reduce.sum, "max": reduce.max, "min": reduce.min}


class CooperativeGroup:
    """`size` tiles side by side (None: the whole group). All of them must call each method together.

    Values are scalars or blocks; each element is treated by itself. A group smaller than `size` is one stretch.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size

    def width(self) -> Size:
        """The number of tiles of a stretch in this kernel's group.

        Raises:
            ArgumentError: the group is not made up of such stretches.
        """
        whole = current_trace("tile.warp").group
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
            current_trace("tile.warp").builder.add(tile.meet, [], {"width": width})

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
        return emit_op(tile.exchange, [as_value(x), as_index(lane_id)], width=self.width())

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
        return emit_op(tile.collect, [as_value(x)], width=self.width())

    def _bits(self, seen: Tensor) -> Tensor:
        if self.width() > BALLOT_BITS:
            raise ArgumentError(f"a mask has {BALLOT_BITS} bits, these are {self.width()} tiles", expected="a warp")
        lanes = reshape(iota(shape=(self.width(),), dtype=int64), shape=(self.width(),) + (1,) * (seen.ndim - 1))
        return reduce.sum(where(seen, shift_left(1, lanes), 0), axis=-seen.ndim)


class GridGroup:
    """Every tile of every group of the launch."""

    def sync(self) -> None:
        """`tile.grid_barrier()`."""
        grid_barrier()

    def rank(self) -> Any:
        """`tile.linear_id()`."""
        return linear_id()

    def width(self) -> Size:
        """The number of tiles of the launch."""
        trace = current_trace("tile.grid")
        return math.prod(trace.grid) * trace.group


warp = CooperativeGroup(WARP_SIZE)
block = CooperativeGroup()
grid = GridGroup()


def cooperative_group(size: int) -> CooperativeGroup:
    """The stretch of `size` tiles that this tile is in."""
    if not isinstance(size, int) or size < 1:
        raise ArgumentError("the size of a cooperative group is a constant of at least 1", received=repr(size))
    return CooperativeGroup(size)


@dataclass(frozen=True)
class MBarrier:
    """One of `length` barriers in shared memory, or all of them (slot None); `barriers[k]` is one of them."""

    memory: MemRef
    slot: Any = None
    length: int = 1

    def __getitem__(self, slot: Any) -> MBarrier:
        if isinstance(slot, int) and not 0 <= slot < self.length:
            raise ArgumentError(f"there is no barrier {slot}", expected=f"0 to {self.length - 1}")
        return replace(self, slot=load_if_memref(slot))

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"mbarrier {'' if self.slot is None else self.slot} of {self.length}"

    @property
    def is_whole(self) -> bool:
        """Whether this stands for all that `mbarrier` has made, not for one that was taken of them."""
        return self.slot is None

    def init(self, count: int) -> None:
        """Begin anew with phase 0; each phase takes `count` arrivals."""
        self._do(ops.mbarrier_init, count=_check_positive(count, "arrivals"))

    def arrive(self, count: int = 1) -> None:
        """Each tile here arrives, `count` times; with the last arrival the phase ends."""
        self._do(ops.mbarrier_arrive, count=_check_positive(count, "arrivals"))

    def expect(self, count: int) -> None:
        """Keep the phase open until `count` more bytes have come: those of copies with `barrier=` this one."""
        self._do(ops.mbarrier_expect, count=_check_positive(count, "bytes"))

    def wait(self, parity: Any) -> None:
        """Wait for the end of the latest phase of this parity: 0 for the first phase, then 1, 0, …

        Before the first phase has ended `wait(1)` does not wait: what it would wait for counts as over.
        """
        self._do(ops.mbarrier_wait, as_index(load_if_memref(parity)))

    def copied(self, count: int) -> None:
        """Count the copies begun since the last commit when they are done, as `count` bytes."""
        self._do(ops.mbarrier_copies, count=_check_positive(count, "bytes"))

    def _do(self, op: Any, *operands: Any, **attrs: Any) -> None:
        slot = 0 if self.slot is None else self.slot  # where none is taken the first is meant
        emit_op(op, [self.memory.ref(), as_index(slot), *operands], **attrs)


def mbarrier(count: int, length: int | None = None) -> MBarrier:
    """A barrier (or `length` of them, by number) whose phases take `count` arrivals each, ready for use.

    It lies in shared memory and begins in phase 0. The number of tiles, `tile.group_size()`, is a usual count.
    """
    current_trace("tile.mbarrier")
    number = _check_positive(length or 1, "barriers")
    made = MBarrier(alloc_shared((number, ops.MBARRIER_FIELDS), int64).memory, None, number)
    for slot in range(number):
        made[slot].init(count)
    return made


def mbarrier_init(barrier: MBarrier, count: int) -> None:
    """`barrier.init(count)`."""
    barrier.init(count)


def mbarrier_arrive(barrier: MBarrier, count: int = 1) -> None:
    """`barrier.arrive(count)`."""
    barrier.arrive(count)


def mbarrier_expect(barrier: MBarrier, count: int) -> None:
    """`barrier.expect(count)`."""
    barrier.expect(count)


def mbarrier_wait(barrier: MBarrier, parity: Any) -> None:
    """`barrier.wait(parity)`."""
    barrier.wait(parity)


def _check_positive(number: Any, what: str) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ArgumentError(f"a number of {what} is a constant of at least 1", received=repr(number))
    return number
