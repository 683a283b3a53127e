"""The shadow of memory whose accesses vector clocks order: of each element the last access of every tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tessera.interp.checked.clocks import Clocks
from tessera.interp.checked.shadow import NODE_BITS, Lanes, Met, Slots


class Ordered:
    """Of each touched cell and each column of clocks (a tile, or the copies of an mbarrier) the last access.

    The tables have a row for each cell, and a place in it for each column that has made an access at all.
    """

    def __init__(self, size: int, clocks: Clocks) -> None:
        self.clocks = clocks
        self.row = np.full(size, -1, np.int32)  # of each cell in the tables; -1: nothing has touched it
        self.rows = 0
        self.place = np.zeros(0, np.int64)  # of each column of clocks in the tables; -1: nowhere yet
        self.columns = np.zeros(0, np.int64)  # by place
        self.held = np.zeros((0, 0), np.int64)  # as in Slots: who, and at which node
        self.clock = np.zeros((0, 0), np.int32)
        self.latest = np.zeros(0, np.int64)  # one more than the place that touched the cell last
        self.many = np.zeros(0, bool)  # whether several have touched it

    def met(self, lanes: Lanes) -> Iterator[Met]:
        """The lanes that meet an access which their tile does not know of, for each column of such."""
        rows = self.row[lanes.cells]
        touched = rows >= 0
        several = touched & self.many[rows]
        yield from self._met_one(lanes, rows, np.flatnonzero(touched & ~several))
        if several.any():
            yield from self._met_several(lanes, rows, np.flatnonzero(several))

    def _met_one(self, lanes: Lanes, rows: np.ndarray, which: np.ndarray) -> Iterator[Met]:
        """As `met`, of lanes whose cells one column alone has touched."""
        rows = rows[which]
        place = self.latest[rows] - 1
        known = self.clocks.known[self.clocks.places(lanes.who[which]), self.columns[place]]
        late = np.flatnonzero(self.clock[rows, place] > known)
        for each in np.unique(place[late]):
            yield from self._own(lanes, which[late[place[late] == each]], int(each))

    def _met_several(self, lanes: Lanes, rows: np.ndarray, which: np.ndarray) -> Iterator[Met]:
        known = self.clocks.known[:, self.columns][self.clocks.places(lanes.who[which])]
        late = self.clock[rows[which]] > known
        for place in np.flatnonzero(late.any(axis=0)):
            yield from self._own(lanes, which[late[:, place]], int(place))

    def _own(self, lanes: Lanes, bad: np.ndarray, place: int) -> Iterator[Met]:
        """What lanes meet at a place of the tables, where that is of their own program."""
        held = self.held[self.row[lanes.cells[bad]], place]
        own = ((held >> NODE_BITS) - 1) // self.clocks.tiles == lanes.who[bad] // self.clocks.tiles
        if own.any():
            yield Met.of(bad[own], held[own], copied=bool(self.columns[place] >= self.clocks.tiles))

    def record(self, lanes: Lanes, node: int) -> bool:
        """Note these accesses; whether several tiles touch one cell among them."""
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

    def withdraw(self, lanes: Lanes) -> None:
        """Forget the last access of these tiles to these cells: it was the beginning of a copy."""
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
            self.held, self.clock = _grown(self.held, room), _grown(self.clock, room)
            self.latest, self.many = _grown(self.latest, room[:1]), _grown(self.many, room[:1])


def _grown(table: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    grown = np.zeros(shape, table.dtype)
    grown[tuple(slice(n) for n in table.shape)] = table
    return grown


@dataclass
class Domain:
    """Between whom races are looked for: tiles of a group (in one epoch), or programs of a grid (always).

    With `clocks` these say which tiles of a program are ordered, and epochs have no meaning. `share` instances count as
    one. With a `level` they are tiles of one stretch of this level, in an epoch of it.
    """

    kind: str
    share: int
    timeless: bool
    clocks: Clocks | None = None
    level: int | None = None
    slots: dict[str, Slots | Ordered] = field(default_factory=dict)

    def of(self, access: str, size: int) -> Slots | Ordered:
        """The slots of a kind of access, made when first needed."""
        if access not in self.slots:
            self.slots[access] = (
                Slots(size, self.share, self.timeless, self.level)
                if self.clocks is None
                else Ordered(size, self.clocks)
            )
        return self.slots[access]
