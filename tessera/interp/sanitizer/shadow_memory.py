"""Shadow memory: who last accessed each element, when, and at which node.

Accesses are ordered by barrier epochs or by vector clocks (Flanagan and Freund, FastTrack, PLDI 2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.core.device import array_address
from tessera.interp.sanitizer.vector_clocks import VectorClocks
from tessera.interp.tile.memory import InstanceMemory

NODE_BITS = 20  # bits of a slot for the node; the rest is the instance
READ, WRITE, ATOMIC = "read", "write", "atomic"
# The kinds of earlier access that conflict with each kind: atomics do not conflict with atomics, nor reads with reads.
CONFLICTING_KINDS = {READ: (WRITE, ATOMIC), WRITE: (READ, WRITE, ATOMIC), ATOMIC: (READ, WRITE)}


@dataclass
class AccessLanes:
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

    def part(self, chosen: np.ndarray) -> AccessLanes:
        """The lanes where `chosen` holds."""
        column = None if self.column is None else self.column[chosen]
        inner = tuple(epoch[chosen] for epoch in self.inner)
        return AccessLanes(self.cells[chosen], self.who[chosen], self.epoch[chosen], self.place[chosen], column, inner)


@dataclass(frozen=True)
class ConflictingLanes:
    """Lanes (by their number in the query) that conflict with an access, with its instance and node.

    `copied`: of a copy that an mbarrier counts, begun by that instance.
    """

    lanes: np.ndarray
    who: np.ndarray
    node: np.ndarray
    copied: bool = False

    @classmethod
    def of(cls, lanes: np.ndarray, held: np.ndarray, copied: bool = False) -> ConflictingLanes:
        """The lanes that conflict with the accesses in slots."""
        return cls(lanes, (held >> NODE_BITS) - 1, held & ((1 << NODE_BITS) - 1), copied)

    def part(self, chosen: np.ndarray) -> ConflictingLanes:
        """The lanes where `chosen` holds."""
        return ConflictingLanes(self.lanes[chosen], self.who[chosen], self.node[chosen], self.copied)


class EpochShadow:
    """For each cell the last instance that accessed it, and the last other one of the same epoch.

    Two are enough: whoever comes next differs from one of them if it differs from anyone (as FastTrack keeps one
    write and widens reads; Flanagan and Freund, PLDI 2009). `share` instances count as one. Where nothing ever
    orders instances (`timeless`) there are no epochs. With a `level` they are those of stretches within the group: what
    is forgotten because another stretch came after meets that one's access, by the epochs of what holds both.
    """

    def __init__(self, size: int, share: int, timeless: bool, level: int | None = None) -> None:
        self.share, self.level = share, level
        # The instance's number plus 1, and the node's: 0 where no access was recorded.
        self.held = [np.zeros(size, np.int64) for _ in (0, 1)]
        self.epoch = None if timeless else [np.full(size, -1, np.int64) for _ in (0, 1)]
        self.used = 0  # slots with any record
        self._seen: tuple[AccessLanes, np.ndarray] | None = (
            None  # the last result of `foreign` for slot 0: it is queried twice
        )

    def who(self, slot: int, cells: np.ndarray) -> np.ndarray:
        """The instances in a slot of some cells; -1 for none."""
        return (self.held[slot][cells] >> NODE_BITS) - 1

    def met(self, lanes: AccessLanes) -> Iterator[ConflictingLanes]:
        """For each slot the lanes that conflict with an access of another instance in their own epoch."""
        for slot in range(self.used):
            bad = np.flatnonzero(self.find_conflicts(slot, lanes))
            if bad.size:
                yield ConflictingLanes.of(bad, self.held[slot][lanes.cells[bad]])

    def find_conflicts(self, slot: int, lanes: AccessLanes) -> np.ndarray:
        """The lanes whose cell another instance accessed in the lane's own epoch."""
        if not slot and self._seen is not None and self._seen[0] is lanes:
            return self._seen[1]
        before = self.who(slot, lanes.cells)
        other = self._differ(before, lanes.who)
        found = other & (before >= 0 if self.epoch is None else self.epoch[slot][lanes.cells] == self._now(lanes))
        if not slot:
            self._seen = lanes, found
        return found

    def _now(self, lanes: AccessLanes) -> np.ndarray:
        return lanes.epoch if self.level is None else lanes.inner[self.level]

    def _differ(self, one: np.ndarray, two: np.ndarray) -> np.ndarray:
        """Whether instances are different parties; where there is none (-1) the result is unused."""
        if self.share & (self.share - 1):
            return one // self.share != two // self.share
        return one != two if self.share == 1 else (one ^ two) >= self.share  # they differ in a higher bit

    def record(self, lanes: AccessLanes, node: int) -> bool:
        """Record these accesses; return whether several instances access one cell among them."""
        before = self.find_conflicts(0, lanes) if self.used else None
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

    def _keep(self, lanes: AccessLanes) -> None:
        for table in (self.held, self.epoch):
            if table is not None:
                table[1][lanes.cells] = table[0][lanes.cells]

    def _set(self, slot: int, lanes: AccessLanes, node: int) -> None:
        self._seen = None
        self.held[slot][lanes.cells] = (lanes.who + 1 << NODE_BITS) + node
        if self.epoch is not None:
            self.epoch[slot][lanes.cells] = self._now(lanes)


@dataclass(eq=False)
class ShadowRegion:
    """A range of memory with its shadow; a cell is `unit` bytes.

    `ready` says which cells hold a value (None: all). `arriving` counts the asynchronous copies on the way into
    each cell, `lent` those that still read it; `copy` is the node that began the last of them.
    """

    low: int
    high: int
    unit: int
    domains: list[RaceDomain]
    ready: np.ndarray | None
    keeper: object  # the memory itself, kept alive so that its address is not reused
    swizzle: str = ""
    copy_writes: np.ndarray | None = None
    copy_reads: np.ndarray | None = None
    copy: np.ndarray | None = None
    # Accesses proven disjoint, which are not in the shadow yet; None: the shadow holds all.
    log: list[Any] | None = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of cells."""
        return (self.high - self.low) // self.unit

    def hold(self) -> None:
        """Allocate the counters of asynchronous copies."""
        if self.copy_writes is None:
            self.copy_writes, self.copy_reads = np.zeros(self.size, np.int16), np.zeros(self.size, np.int16)
            self.copy = np.zeros(self.size, np.int32)

    def cells(self, memory: InstanceMemory, indices: list[np.ndarray]) -> np.ndarray:
        """The cells of elements, an index array for each axis of the memory's array."""
        total = np.asarray((array_address(memory.array) - self.low) // self.unit, np.int64)
        for index, stride in zip(indices, memory.array.strides, strict=True):
            total = total + index * (stride // self.unit)
        return total


class ClockShadow:
    """For each accessed cell and each clock column (a tile, or the copies of an mbarrier) the last access.

    The tables have a row for each cell, and a place in it for each column that has made an access at all.
    """

    def __init__(self, size: int, clocks: VectorClocks) -> None:
        self.clocks = clocks
        self.row = np.full(size, -1, np.int32)  # of each cell in the tables; -1: nothing has touched it
        self.rows = 0
        self.place = np.zeros(0, np.int64)  # of each column of clocks in the tables; -1: nowhere yet
        self.columns = np.zeros(0, np.int64)  # by place
        self.held = np.zeros((0, 0), np.int64)  # as in Slots: who, and at which node
        self.clock = np.zeros((0, 0), np.int32)
        self.latest = np.zeros(0, np.int64)  # one more than the place that touched the cell last
        self.many = np.zeros(0, bool)  # whether several have touched it

    def met(self, lanes: AccessLanes) -> Iterator[ConflictingLanes]:
        """For each clock column the lanes that conflict with an access that does not happen before theirs."""
        rows = self.row[lanes.cells]
        touched = rows >= 0
        several = touched & self.many[rows]
        yield from self._met_one(lanes, rows, np.flatnonzero(touched & ~several))
        if several.any():
            yield from self._met_several(lanes, rows, np.flatnonzero(several))

    def _met_one(self, lanes: AccessLanes, rows: np.ndarray, which: np.ndarray) -> Iterator[ConflictingLanes]:
        """As `met`, of lanes whose cells one column alone has touched."""
        rows = rows[which]
        place = self.latest[rows] - 1
        known = self.clocks.known[self.clocks.places(lanes.who[which]), self.columns[place]]
        late = np.flatnonzero(self.clock[rows, place] > known)
        for each in np.unique(place[late]):
            yield from self._own(lanes, which[late[place[late] == each]], int(each))

    def _met_several(self, lanes: AccessLanes, rows: np.ndarray, which: np.ndarray) -> Iterator[ConflictingLanes]:
        known = self.clocks.known[:, self.columns][self.clocks.places(lanes.who[which])]
        late = self.clock[rows[which]] > known
        for place in np.flatnonzero(late.any(axis=0)):
            yield from self._own(lanes, which[late[:, place]], int(place))

    def _own(self, lanes: AccessLanes, bad: np.ndarray, place: int) -> Iterator[ConflictingLanes]:
        """The lanes whose recorded access at one index of the tables is by their own program."""
        held = self.held[self.row[lanes.cells[bad]], place]
        own = ((held >> NODE_BITS) - 1) // self.clocks.tiles == lanes.who[bad] // self.clocks.tiles
        if own.any():
            yield ConflictingLanes.of(bad[own], held[own], copied=bool(self.columns[place] >= self.clocks.tiles))

    def record(self, lanes: AccessLanes, node: int) -> bool:
        """Record these accesses; return whether several tiles access one cell among them."""
        column = lanes.who % self.clocks.tiles if lanes.column is None else lanes.column
        rows, place = self._rows(lanes.cells), self._places(column)
        self._grow()
        before = self.latest[rows]
        self.held[rows, place] = (lanes.who + 1 << NODE_BITS) + node
        self.clock[rows, place] = lanes.epoch
        self.latest[rows] = place + 1
        both = self.latest[rows] != place + 1
        self.many[rows[both | ((before > 0) & (before != place + 1))]] = True
        return bool(both.any())

    def withdraw(self, lanes: AccessLanes) -> None:
        """Remove the last access of these tiles to these cells: it was the issue of a copy."""
        rows = self.row[lanes.cells]
        here = rows >= 0
        self.clock[rows[here], self.place[lanes.who[here] % self.clocks.tiles]] = 0

    def _rows(self, cells: np.ndarray) -> np.ndarray:
        fresh = cells[self.row[cells] < 0]
        if fresh.size:
            new = np.unique(fresh)
            self.row[new] = np.arange(self.rows, self.rows + new.size)
            self.rows += new.size
        return self.row[cells]

    def _places(self, columns: np.ndarray) -> np.ndarray:
        count = self.clocks.known.shape[1]
        if count > self.place.size:
            self.place = np.r_[self.place, np.full(count - self.place.size, -1)]
        found = np.flatnonzero(np.bincount(columns, minlength=count))
        new = found[self.place[found] < 0]
        self.place[new] = np.arange(self.columns.size, self.columns.size + new.size)
        self.columns = np.r_[self.columns, new]
        return self.place[columns]

    def _grow(self) -> None:
        rows, columns = self.held.shape
        if self.rows > rows or self.columns.size > columns:
            room = (max(self.rows, 2 * rows) if self.rows > rows else rows, self.columns.size)
            self.held, self.clock = _grow_table(self.held, room), _grow_table(self.clock, room)
            self.latest, self.many = _grow_table(self.latest, room[:1]), _grow_table(self.many, room[:1])


def _grow_table(table: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    grown = np.zeros(shape, table.dtype)
    grown[tuple(slice(n) for n in table.shape)] = table
    return grown


@dataclass
class RaceDomain:
    """Between whom races are looked for: tiles of a group (in one epoch), or programs of a grid (always).

    With `clocks` these say which tiles of a program are ordered, and epochs have no meaning. `share` instances count as
    one. With a `level` they are tiles of one stretch of this level, in an epoch of it.
    """

    kind: str
    share: int
    timeless: bool
    clocks: VectorClocks | None = None
    level: int | None = None
    slots: dict[str, EpochShadow | ClockShadow] = field(default_factory=dict)

    def of(self, access: str, size: int) -> EpochShadow | ClockShadow:
        """The slots of a kind of access, allocated on first use."""
        if access not in self.slots:
            self.slots[access] = (
                EpochShadow(size, self.share, self.timeless, self.level)
                if self.clocks is None
                else ClockShadow(size, self.clocks)
            )
        return self.slots[access]


@dataclass(eq=False)
class _ByteRange:
    low: int
    bytes: np.ndarray

    @property
    def high(self) -> int:
        return self.low + self.bytes.size


class InitialisedBytes:
    """Disjoint ranges of memory, with a bool for each byte: whether it is initialised. It persists between launches."""

    def __init__(self) -> None:
        self.areas: list[_ByteRange] = []

    def view(self, low: int, high: int, unit: int) -> np.ndarray:
        """A bool for each `unit` bytes from `low` to before `high`, that one may set; `spread` then makes it count."""
        area = self.cover(low, high)
        return area.bytes[low - area.low : high - area.low : unit]

    def spread(self, low: int, high: int, unit: int) -> None:
        """Apply what was set in a view to all bytes of its cells."""
        area = self.cover(low, high)
        cells = area.bytes[low - area.low : high - area.low].reshape(-1, unit)
        cells[cells[:, 0]] = True

    def mark(self, low: int, high: int) -> None:
        """Mark all bytes as initialised."""
        area = self.cover(low, high)
        area.bytes[low - area.low : high - area.low] = True

    def cover(self, low: int, high: int) -> _ByteRange:
        """The area that holds a range; areas that it overlaps are merged."""
        met = [a for a in self.areas if a.low < high and low < a.high]
        if len(met) == 1 and met[0].low <= low and high <= met[0].high:
            return met[0]
        first, last = min([low, *(a.low for a in met)]), max([high, *(a.high for a in met)])
        whole = _ByteRange(first, np.zeros(last - first, bool))
        for each in met:
            whole.bytes[each.low - first : each.high - first] = each.bytes
        self.areas = [a for a in self.areas if a not in met] + [whole]
        return whole
