"""Shadow memory: who last touched each element, when, and at which node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.interp.memory import Memory

if TYPE_CHECKING:
    from tessera.interp.checked.ordered import Domain

NODE_BITS = 20  # of a slot, for the node; the rest is for the instance
READ, WRITE, ATOMIC = "read", "write", "atomic"
# What a new access must not meet: atomics order one another, and reads disturb nobody.
OPPOSED = {READ: (WRITE, ATOMIC), WRITE: (READ, WRITE, ATOMIC), ATOMIC: (READ, WRITE)}


@dataclass
class Lanes:
    """The elements that one op touches: of each its cell, its instance, that one's epoch, and its place in the op.

    Where vector clocks order accesses the epoch is a clock: the instance's own, or that of a `column`. `inner` are the
    epochs of the stretches that the instance is in, the narrowest first; `epoch` is that of its group.
    """

    cells: np.ndarray
    who: np.ndarray
    epoch: np.ndarray
    place: np.ndarray
    column: np.ndarray | None = None
    inner: tuple[np.ndarray, ...] = ()

    def part(self, chosen: np.ndarray) -> Lanes:
        """The lanes where `chosen` holds."""
        column = None if self.column is None else self.column[chosen]
        inner = tuple(epoch[chosen] for epoch in self.inner)
        return Lanes(self.cells[chosen], self.who[chosen], self.epoch[chosen], self.place[chosen], column, inner)


@dataclass(frozen=True)
class Met:
    """Lanes (by their number among those asked for) that meet an access: of whom, at which node.

    `copied`: of a copy that an mbarrier counts, begun by that instance.
    """

    lanes: np.ndarray
    who: np.ndarray
    node: np.ndarray
    copied: bool = False

    @classmethod
    def of(cls, lanes: np.ndarray, held: np.ndarray, copied: bool = False) -> Met:
        """Lanes that meet what slots hold."""
        return cls(lanes, (held >> NODE_BITS) - 1, held & ((1 << NODE_BITS) - 1), copied)

    def part(self, chosen: np.ndarray) -> Met:
        """The lanes where `chosen` holds."""
        return Met(self.lanes[chosen], self.who[chosen], self.node[chosen], self.copied)


class Slots:
    """Of each cell the last instance that touched it, and the last other one of the same epoch.

    Two are enough: whoever comes next differs from one of them if it differs from anyone (as FastTrack keeps one
    write and widens reads; Flanagan and Freund, PLDI 2009). `share` instances count as one. Where nothing ever
    orders instances (`timeless`) there are no epochs. With a `level` they are those of stretches within the group: what
    is forgotten because another stretch came after meets that one's access, by the epochs of what holds both.
    """

    def __init__(self, size: int, share: int, timeless: bool, level: int | None = None) -> None:
        self.share, self.level = share, level
        # One more than the instance's number, and the node's: 0 where nothing has touched the cell.
        self.held = [np.zeros(size, np.int64) for _ in (0, 1)]
        self.epoch = None if timeless else [np.full(size, -1, np.int64) for _ in (0, 1)]
        self.used = 0  # slots that anything was written to
        self._seen: tuple[Lanes, np.ndarray] | None = None  # what `foreign` found last in slot 0: it is asked twice

    def who(self, slot: int, cells: np.ndarray) -> np.ndarray:
        """The instances in a slot of some cells; -1 for none."""
        return (self.held[slot][cells] >> NODE_BITS) - 1

    def met(self, lanes: Lanes) -> Iterator[Met]:
        """The lanes that meet an access of another instance in their own epoch, for each slot."""
        for slot in range(self.used):
            bad = np.flatnonzero(self.foreign(slot, lanes))
            if bad.size:
                yield Met.of(bad, self.held[slot][lanes.cells[bad]])

    def foreign(self, slot: int, lanes: Lanes) -> np.ndarray:
        """The lanes whose cell another instance touched in the lane's own epoch."""
        if not slot and self._seen is not None and self._seen[0] is lanes:
            return self._seen[1]
        before = self.who(slot, lanes.cells)
        other = self._differ(before, lanes.who)
        found = other & (before >= 0 if self.epoch is None else self.epoch[slot][lanes.cells] == self._now(lanes))
        if not slot:
            self._seen = lanes, found
        return found

    def _now(self, lanes: Lanes) -> np.ndarray:
        return lanes.epoch if self.level is None else lanes.inner[self.level]

    def _differ(self, one: np.ndarray, two: np.ndarray) -> np.ndarray:
        """Whether instances count as two; where there is none (-1) the answer is not looked at."""
        if self.share & (self.share - 1):
            return one // self.share != two // self.share
        return one != two if self.share == 1 else (one ^ two) >= self.share  # they differ in a higher bit

    def record(self, lanes: Lanes, node: int) -> bool:
        """Note these accesses; whether several instances touch one cell among them."""
        before = self.foreign(0, lanes) if self.used else None
        if before is not None and before.any():
            self._keep(lanes.part(before))
            self.used = 2
        self._set(0, lanes, node)
        self.used = max(self.used, 1)
        others = self._differ(lanes.who, self.who(0, lanes.cells))
        if not others.any():
            return False
        self._set(1, lanes.part(others), node)
        self.used = 2
        return True

    def _keep(self, lanes: Lanes) -> None:
        for table in (self.held, self.epoch):
            if table is not None:
                table[1][lanes.cells] = table[0][lanes.cells]

    def _set(self, slot: int, lanes: Lanes, node: int) -> None:
        self._seen = None
        self.held[slot][lanes.cells] = (lanes.who + 1 << NODE_BITS) + node
        if self.epoch is not None:
            self.epoch[slot][lanes.cells] = self._now(lanes)


@dataclass(eq=False)
class Region:
    """A stretch of memory with its shadow; a cell is `unit` bytes.

    `ready` says which cells hold a value (None: all). `arriving` counts the asynchronous copies on the way into
    each cell, `lent` those that still read it; `copy` is the node that began the last of them.
    """

    low: int
    high: int
    unit: int
    domains: list[Domain]
    ready: np.ndarray | None
    keeper: object  # the memory itself, kept so that its address is not used again
    swizzle: str = ""
    arriving: np.ndarray | None = None
    lent: np.ndarray | None = None
    copy: np.ndarray | None = None
    # Accesses that are not in the shadow yet, since they were seen to be apart; None: they all are.
    log: list[Any] | None = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of cells."""
        return (self.high - self.low) // self.unit

    def hold(self) -> None:
        """Make the counters of asynchronous copies."""
        if self.arriving is None:
            self.arriving, self.lent = np.zeros(self.size, np.int16), np.zeros(self.size, np.int16)
            self.copy = np.zeros(self.size, np.int32)

    def cells(self, memory: Memory, indices: list[np.ndarray]) -> np.ndarray:
        """The cells of elements, an index array for each axis of the memory's array."""
        total = np.asarray((address(memory.array) - self.low) // self.unit, np.int64)
        for index, stride in zip(indices, memory.array.strides, strict=True):
            total = total + index * (stride // self.unit)
        return total


def address(array: np.ndarray) -> int:
    """Where an array's first element lies."""
    return int(array.__array_interface__["data"][0])


def span(array: np.ndarray) -> tuple[int, int]:
    """The first address of an array's elements, and the one after the last."""
    steps = [s * (n - 1) for s, n in zip(array.strides, array.shape, strict=True)]
    base = address(array)
    return base + sum(s for s in steps if s < 0), base + sum(s for s in steps if s > 0) + array.itemsize
