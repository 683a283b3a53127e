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
    """Instances in a box: for each instance axis (grid axes, then the tiles of a group) the first and the count.

    Where instances part ways they are narrowed to a smaller box if they lie side by side, else masked.
    """

    grid: tuple[int, ...]
    group: int
    first: tuple[int, ...]
    count: tuple[int, ...]
    bound: bool = False  # values are Bounded, and ops follow their error rules (design 5)
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
        """Each instance's place along an instance axis."""
        return AffineScalar(self.first[axis], tuple(int(a == axis) for a in range(self.rank)))

    def constant(self, value: int) -> AffineScalar:
        """The same index for every instance."""
        return AffineScalar(value, (0,) * self.rank)

    def arrays(self, values: Sequence[Any]) -> list[Any]:
        """Values with affine scalars made arrays."""
        return [v.array(self.count) if isinstance(v, AffineScalar) else v for v in values]

    def live(self, condition: np.ndarray) -> np.ndarray:
        """Where a condition holds among the active instances."""
        return condition if self.active is None else condition & self.active

    @property
    def divergent(self) -> bool:
        """Whether some tiles of a group run here while others do not."""
        if self.group == 1:
            return False
        mask = self.active
        parted = mask is not None and mask.shape[-1] > 1 and (mask != mask[..., :1]).any()
        return self.count[-1] != self.group or bool(parted)

    def split_masks(self, masks: Sequence[np.ndarray], together: int) -> list[tuple[np.ndarray, int]]:
        """Masks cut into one for so many tiles of a group, without empty ones; with the number of the mask it is of."""
        stretch = (self.first[-1] + np.arange(self.count[-1])) // together
        cut = ((mask & (stretch == each), number) for number, mask in enumerate(masks) for each in np.unique(stretch))
        return [(mask, number) for mask, number in cut if mask.any()]

    @contextmanager
    def masked(self, mask: np.ndarray) -> Iterator[None]:
        """Run with only the instances of `mask` active."""
        before, self.active = self.active, mask
        try:
            yield
        finally:
            self.active = before

    def named(self, error: OutOfBoundsError) -> OutOfBoundsError:
        """An error that knows an instance only by its place, with its program and tile."""
        if error.lane is not None:
            error.received = f"{error.received} in {self.name(error.lane[: self.rank])}"
            error.lane = None
        return error

    def name(self, place: Sequence[int]) -> str:
        """The instance at a place among the present ones, in words: its program and, in a group, its tile."""
        numbers = tuple(f + i for f, i in zip(self.first, place, strict=True))
        tile = f", tile {numbers[-1]}" if self.group > 1 else ""
        return f"program {numbers[: len(self.grid)]}{tile}"


class InstanceRange(NamedTuple):
    """The instances from `low` to before `high` along one instance axis."""

    axis: int
    low: int
    high: int

    def of(self, other: InstanceRange) -> InstanceRange:
        """This part as one of another that it lies in."""
        return InstanceRange(self.axis, self.low - other.low, self.high - other.low)

    def without(self, inner: InstanceRange) -> list[InstanceRange]:
        """What lies before and behind an inner part."""
        sides = [InstanceRange(self.axis, self.low, inner.low), InstanceRange(self.axis, inner.high, self.high)]
        return [p for p in sides if p.high > p.low]

    def cut(self, value: Any) -> Any:
        """What a value is to these instances."""
        if isinstance(value, AffineScalar):
            return value.cut(self.axis, self.low)
        if isinstance(value, InstanceMemory):
            own = value.lead > self.axis and value.array.shape[self.axis] > 1
            return InstanceMemory(self._slice(value.array), value.name, value.lead, value.written) if own else value
        return self._slice(value) if value.shape[self.axis] > 1 else value

    def cuts(self, values: Sequence[Any]) -> list[Any]:
        """What values are to these instances."""
        return [self.cut(v) for v in values]

    def _slice(self, array: Any) -> Any:
        return array[(FULL_SLICE,) * self.axis + (slice(self.low, self.high),)]

    def join(self, inside: Any, outside: Any, count: int) -> Any:
        """One value of `count` instances: `inside` for these, `outside` (of full or single size) for the others."""
        if inside is outside:
            return inside
        rest = InstanceRange(self.axis, 0, count).without(self)
        pieces = [(inside, self), *((p.cut(outside), p) for p in rest)]
        return concatenate_ranges(sorted(pieces, key=lambda piece: piece[1].low))

    def put(self, array: Any, value: Any) -> None:
        """Set what an array holds for these instances."""
        self._slice(array)[...] = value


def concatenate_ranges(pieces: Sequence[tuple[Any, InstanceRange]]) -> Any:
    """The values of parts that make up all instances as one; each holds 1 or its part's count of them."""
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
    """The part that a mask selects, where it varies along one axis and what it selects lies side by side."""
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
    """`body(walk)` on the instances of a part, with the outer values it uses cut to them; arrays come back."""
    outer, axis, saved = walk.env, part.axis, (machine.first, machine.count, machine.active)
    env = {v: part.cut(outer[v]) for v in values if v in outer}  # a compiled program's constants are not there
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
    """New values where the mask holds, old ones elsewhere."""
    return [
        n if n is o else np.where(expand_block_axes(mask, n.ndim - mask.ndim), n, o)
        for n, o in zip(new, old, strict=True)
    ]
