"""The machine of the Tile interpreter: which program instances run, and how they part and join again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tessera.errors import OutOfBoundsError
from tessera.interp.affine import Affine
from tessera.interp.memory import Memory, expand
from tessera.ir.core import Node


@dataclass
class Machine:
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
    ) -> Machine:
        """A machine for a chunk of the grid."""
        tiles = (group,) if group > 1 else ()
        return cls(grid, group, first + (0,) * len(tiles), count + tiles, bound)

    @property
    def rank(self) -> int:
        """The number of instance axes."""
        return len(self.count)

    def place(self, axis: int) -> Affine:
        """Each instance's place along an instance axis."""
        return Affine(self.first[axis], tuple(int(a == axis) for a in range(self.rank)))

    def constant(self, value: int) -> Affine:
        """The same index for every instance."""
        return Affine(value, (0,) * self.rank)

    def arrays(self, values: Sequence[Any]) -> list[Any]:
        """Values with affine scalars made arrays."""
        return [v.array(self.count) if isinstance(v, Affine) else v for v in values]

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

    @contextmanager
    def masked(self, mask: np.ndarray) -> Iterator[None]:
        """Run with only the instances of `mask` active."""
        before, self.active = self.active, mask
        try:
            yield
        finally:
            self.active = before

    @contextmanager
    def narrowed(self, part: Part) -> Iterator[None]:
        """Run with only the instances of a part, all of them active."""
        saved = replace(self)
        axis = part.axis
        self.first = (*self.first[:axis], self.first[axis] + part.low, *self.first[axis + 1 :])
        self.count = (*self.count[:axis], part.high - part.low, *self.count[axis + 1 :])
        self.active = None
        try:
            with self.naming():
                yield
        finally:
            self.first, self.count, self.active = saved.first, saved.count, saved.active

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors in here that know an instance only by its place name its program and tile."""
        try:
            yield
        except OutOfBoundsError as error:
            if error.lane is not None:
                error.received = f"{error.received} in {self.name(error.lane[: self.rank])}"
                error.lane = None
            raise

    def name(self, place: Sequence[int]) -> str:
        """The instance at a place among the present ones, in words: its program and, in a group, its tile."""
        numbers = tuple(f + i for f, i in zip(self.first, place, strict=True))
        tile = f", tile {numbers[-1]}" if self.group > 1 else ""
        return f"program {numbers[: len(self.grid)]}{tile}"


@dataclass(frozen=True)
class Part:
    """The instances from `low` to before `high` along one instance axis."""

    axis: int
    low: int
    high: int

    def cut(self, value: Any) -> Any:
        """What a value is to these instances."""
        if isinstance(value, Affine):
            return value.cut(self.axis, self.low)
        if isinstance(value, Memory):
            own = value.lead > self.axis and value.array.shape[self.axis] > 1
            return replace(value, array=self._slice(value.array)) if own else value
        return self._slice(value) if value.shape[self.axis] > 1 else value

    def _slice(self, array: Any) -> Any:
        return array[(slice(None),) * self.axis + (slice(self.low, self.high),)]

    def join(self, inside: Any, outside: Any, count: int) -> Any:
        """One value of `count` instances: `inside` for these, `outside` (of full or single size) for the others."""
        if inside is outside:
            return inside
        pieces = [Part(self.axis, 0, self.low), self, Part(self.axis, self.high, count)]
        filled = [(inside if p is self else p.cut(outside), p.high - p.low) for p in pieces]
        return chain([(value, size) for value, size in filled if size], self.axis)


def chain(pieces: Sequence[tuple[Any, int]], axis: int) -> Any:
    """Values of neighbouring instances as one; each holds 1 or its count of them along the axis."""
    others = [(*v.shape[:axis], 1, *v.shape[axis + 1 :]) for v, _ in pieces]
    shape = np.broadcast_shapes(*others)
    sized = [np.broadcast_to(v, (*shape[:axis], n, *shape[axis + 1 :])) for v, n in pieces]
    return np.concatenate(sized, axis=axis)


def part_of(mask: np.ndarray) -> Part | None:
    """The part that a mask selects, where it varies along one axis and what it selects lies side by side."""
    axes = [a for a, n in enumerate(mask.shape) if n > 1]
    if len(axes) != 1:
        return None
    places = np.flatnonzero(mask)
    low, high = int(places[0]), int(places[-1]) + 1
    return Part(axes[0], low, high) if high - low == len(places) else None


def within(
    machine: Machine, part: Part, values: frozenset, walk: Any, body: Callable[[Any], Sequence[Any]]
) -> list[Any]:
    """`body(walk)` on the instances of a part, with the outer values it uses cut to them; arrays come back."""
    env = {v: part.cut(walk.env[v]) for v in values}
    with machine.narrowed(part):
        return machine.arrays(body(walk.beside(env)))


def merge(mask: np.ndarray, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """New values where the mask holds, old ones elsewhere."""
    return [n if n is o else np.where(expand(mask, n.ndim - mask.ndim), n, o) for n, o in zip(new, old, strict=True)]
