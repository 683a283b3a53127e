"""Execution state of the Tile interpreter: which program instances are active (SIMT masks and ranges)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import OutOfBoundsError
from tessera.interp.tile.affine import AffineScalar
from tessera.interp.tile.memory import InstanceMemory, expand_block_axes
from tessera.ir.core import Node, Value

FULL_SLICE = slice(None)


@dataclass
class TileMachine:
    """The instances of a box: for each instance axis (grid axes, then the tiles of a group) the first and the count.

    Divergent instances become a smaller box where they are contiguous, else a mask.
    """

    grid: tuple[int, ...]
    group: int
    first: tuple[int, ...]
    count: tuple[int, ...]
    bound: bool = False  # values carry error bounds, and ops follow their error rules (design 5)
    active: np.ndarray | None = None
    constants: dict[Node, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(
        cls, grid: tuple[int, ...], first: tuple[int, ...], count: tuple[int, ...], group: int, bound: bool
    ) -> TileMachine:
        """A machine for a chunk of the grid."""
        tiles = (group,) if group > 1 else ()
        return cls(grid, group, first + (0,) * len(tiles), count + tiles, bound)

    @property
    def rank(self) -> int:
        """The number of instance axes."""
        return len(self.count)

    def place(self, axis: int) -> AffineScalar:
        """Each instance's index along an instance axis."""
        return AffineScalar(self.first[axis], tuple(int(a == axis) for a in range(self.rank)))

    def constant(self, value: int) -> AffineScalar:
        """The same index for every instance."""
        return AffineScalar(value, (0,) * self.rank)

    def arrays(self, values: Sequence[Any]) -> list[Any]:
        """Convert affine scalars among values to arrays."""
        return [v.array(self.count) if isinstance(v, AffineScalar) else v for v in values]

    def live(self, condition: np.ndarray) -> np.ndarray:
        """The active instances for which a condition holds."""
        return condition if self.active is None else condition & self.active

    @property
    def divergent(self) -> bool:
        """Whether only some tiles of a group are active."""
        if self.group == 1:
            return False
        mask = self.active
        parted = mask is not None and mask.shape[-1] > 1 and (mask != mask[..., :1]).any()
        return self.count[-1] != self.group or bool(parted)

    def split_masks(self, masks: Sequence[np.ndarray], together: int) -> list[tuple[np.ndarray, int]]:
        """Split masks by partitions of a group's tiles; yield the non-empty parts with the number of their mask."""
        stretch = (self.first[-1] + np.arange(self.count[-1])) // together
        cut = ((mask & (stretch == each), number) for number, mask in enumerate(masks) for each in np.unique(stretch))
        return [(mask, number) for mask, number in cut if mask.any()]

    @contextmanager
    def masked(self, mask: np.ndarray) -> Iterator[None]:
        """Run with only the active instances of `mask`."""
        before, self.active = self.active, mask
        try:
            yield
        finally:
            self.active = before

    def named(self, error: OutOfBoundsError) -> OutOfBoundsError:
        """Complete an error that has only an instance index: add its program and tile."""
        if error.lane is not None:
            error.received = f"{error.received} in {self.name(error.lane[: self.rank])}"
            error.lane = None
        return error

    def name(self, place: Sequence[int]) -> str:
        """Format an active instance by its index: its program and, in a group, its tile."""
        numbers = tuple(f + i for f, i in zip(self.first, place, strict=True))
        tile = f", tile {numbers[-1]}" if self.group > 1 else ""
        return f"program {numbers[: len(self.grid)]}{tile}"


class InstanceRange(NamedTuple):
    """The instances from `low` to before `high` along one instance axis."""

    axis: int
    low: int
    high: int

    def of(self, other: InstanceRange) -> InstanceRange:
        """This range relative to another range that contains it."""
        return InstanceRange(self.axis, self.low - other.low, self.high - other.low)

    def without(self, inner: InstanceRange) -> list[InstanceRange]:
        """The ranges before and after an inner range."""
        sides = [InstanceRange(self.axis, self.low, inner.low), InstanceRange(self.axis, inner.high, self.high)]
        return [p for p in sides if p.high > p.low]

    def cut(self, value: Any) -> Any:
        """Slice a value to these instances."""
        if isinstance(value, AffineScalar):
            return value.cut(self.axis, self.low)
        if isinstance(value, InstanceMemory):
            own = value.lead > self.axis and value.array.shape[self.axis] > 1
            return InstanceMemory(self._slice(value.array), value.name, value.lead, value.written) if own else value
        return self._slice(value) if value.shape[self.axis] > 1 else value

    def cuts(self, values: Sequence[Any]) -> list[Any]:
        """Slice values to these instances."""
        return [self.cut(v) for v in values]

    def _slice(self, array: Any) -> Any:
        return array[(FULL_SLICE,) * self.axis + (slice(self.low, self.high),)]

    def join(self, inside: Any, outside: Any, count: int) -> Any:
        """Join a value of `count` instances: `inside` for these, `outside` (of full size or 1) for the others."""
        if inside is outside:
            return inside
        rest = InstanceRange(self.axis, 0, count).without(self)
        pieces = [(inside, self), *((p.cut(outside), p) for p in rest)]
        return concatenate_ranges(sorted(pieces, key=lambda piece: piece[1].low))

    def put(self, array: Any, value: Any) -> None:
        """Set the elements of an array for these instances."""
        self._slice(array)[...] = value


def concatenate_ranges(pieces: Sequence[tuple[Any, InstanceRange]]) -> Any:
    """Concatenate the values of ranges that make up all instances; each has size 1 or its range's count."""
    first, axis = pieces[0][0], pieces[0][1].axis
    shape = list(map(max, *(v.shape for v, _ in pieces))) if len(pieces) > 1 else list(first.shape)
    shape[axis] = pieces[-1][1].high
    if not all(type(v) is np.ndarray for v, _ in pieces):
        sizes = [(*shape[:axis], p.high - p.low, *shape[axis + 1 :]) for _, p in pieces]
        return np.concatenate([np.broadcast_to(v, s) for (v, _), s in zip(pieces, sizes, strict=True)], axis=axis)
    whole = np.empty(shape, first.dtype)
    for value, part in pieces:
        part.put(whole, value)
    return whole


def find_contiguous_range(mask: np.ndarray) -> InstanceRange | None:
    """The range that a mask selects, where it varies along one axis and is contiguous; else None."""
    places = mask.reshape(-1)
    count = int(np.count_nonzero(places))
    if not count or mask.size not in mask.shape:
        return None
    low = int(places.argmax())
    together = np.count_nonzero(places[low : low + count]) == count
    return InstanceRange(mask.shape.index(mask.size), low, low + count) if together else None


def run_on_range(
    machine: TileMachine, part: InstanceRange, values: Set[Value], walk: Any, body: Callable[[Any], Sequence[Any]]
) -> list[Any]:
    """Run `body(walk)` on a range of instances, with the outer values that it uses sliced; return arrays."""
    outer, axis, saved = walk.env, part.axis, (machine.first, machine.count, machine.active)
    env = {v: part.cut(outer[v]) for v in values if v in outer}  # folded constants are not in env
    first, count = machine.first, machine.count
    machine.first = (*first[:axis], first[axis] + part.low, *first[axis + 1 :])
    machine.count = (*count[:axis], part.high - part.low, *count[axis + 1 :])
    machine.active = None
    try:
        return machine.arrays(body(walk.with_values(env)))
    except OutOfBoundsError as error:
        raise machine.named(error) from None
    finally:
        machine.first, machine.count, machine.active = saved


def select_by_mask(mask: np.ndarray, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """Select new values where the mask holds and old ones elsewhere."""
    return [
        n if n is o else np.where(expand_block_axes(mask, n.ndim - mask.ndim), n, o)
        for n, o in zip(new, old, strict=True)
    ]
