"""Lane sets (execution masks): a rectangle of CTAs by threads, a part of one, or any set.

A register is an array [C or 1, T or 1] that broadcasts over C CTAs of T threads: it is uniform over the grid, over a
CTA, over equal thread numbers, or varying. A uniform value is computed once.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

_SPARSE = 8  # a set of less than 1/8 of its rectangle is stored as indices


class LaneSet:
    """A set of the C x T lanes of a machine.

    Three forms: a rectangle (`mask` and `index` None), a rectangle with a mask, or flat indices in ascending order.
    Values of its lanes are arrays that broadcast to `shape`: [rows, columns], or [1, n] for indices.
    """

    def __init__(
        self,
        extent: tuple[int, int],
        rows: slice,
        columns: slice,
        mask: np.ndarray | None = None,
        index: np.ndarray | None = None,
    ) -> None:
        self.extent, self.rows, self.columns, self.mask, self.index = extent, rows, columns, mask, index
        self._masks: dict[np.dtype, np.ndarray] = {}
        self.all_rows = index is None and rows.stop - rows.start == extent[0]
        self.all_columns = index is None and columns.stop - columns.start == extent[1]
        self.full = self.all_rows and self.all_columns and mask is None
        self.plain = index is None and mask is None
        self.shape = (rows.stop - rows.start, columns.stop - columns.start) if index is None else (1, len(index))

    @cached_property
    def count(self) -> int:
        """The number of lanes."""
        return int(np.count_nonzero(self.mask)) if self.mask is not None else self.shape[0] * self.shape[1]

    @cached_property
    def flat(self) -> np.ndarray:
        """The flat indices of the lanes, CTA by CTA."""
        if self.index is not None:
            return self.index
        rows, columns = np.arange(self.rows.start, self.rows.stop), np.arange(self.columns.start, self.columns.stop)
        numbers = rows[:, None] * self.extent[1] + columns
        return numbers.reshape(-1) if self.mask is None else numbers[self.mask]

    @cached_property
    def cta(self) -> np.ndarray:
        """The CTA of each lane, in the shape of values."""
        if self.index is not None:
            return (self.index // self.extent[1])[None]
        return np.arange(self.rows.start, self.rows.stop)[:, None]

    @cached_property
    def thread(self) -> np.ndarray:
        """The thread number of each lane, in the shape of values."""
        if self.index is not None:
            return (self.index % self.extent[1])[None]
        return np.arange(self.columns.start, self.columns.stop)[None]

    @cached_property
    def ctas(self) -> np.ndarray:
        """The CTA of each lane, flat."""
        return self.flat // self.extent[1]

    def view(self, whole: np.ndarray) -> np.ndarray:
        """The values of these lanes in a register [C or 1, T or 1]."""
        if self.full:
            return whole
        rows, columns = whole.shape
        if self.index is None:
            part = whole if rows == 1 or self.all_rows else whole[self.rows]
            return part if columns == 1 or self.all_columns else part[:, self.columns]
        if rows == columns == 1:
            return whole
        if rows > 1 and columns > 1:
            return whole.reshape(-1).take(self.index)[None]
        return whole[0].take(self.thread) if rows == 1 else whole[:, 0].take(self.cta)

    def blend(self, old: np.ndarray, value: np.ndarray) -> np.ndarray:
        """A register after these lanes write a value that broadcasts to their shape."""
        if self.full:
            return value
        rows, columns = self.extent
        if self.index is not None:
            new = np.empty((rows, columns), old.dtype)
            new[...] = old
            new.reshape(-1)[self.index] = value[0]
            return new
        if self.mask is None:
            rows = 1 if self.all_rows and old.shape[0] == value.shape[0] == 1 else rows
            columns = 1 if self.all_columns and old.shape[1] == value.shape[1] == 1 else columns
        new = np.empty((rows, columns), old.dtype)
        new[...] = old
        place = new[slice(None) if rows == 1 else self.rows, slice(None) if columns == 1 else self.columns]
        if self.mask is None:
            place[...] = value
        else:
            place ^= (place ^ value) & self._mask_bits(old.dtype)
        return new

    def _mask_bits(self, dtype: np.dtype) -> np.ndarray:
        """The mask with all bits of a dtype set: selecting by bits is ten times as fast as by a random mask."""
        assert self.mask is not None
        if dtype.kind == "b":
            return self.mask
        if dtype not in self._masks:
            self._masks[dtype] = np.negative(self.mask.astype(dtype))
        return self._masks[dtype]

    def compress(self, value: np.ndarray) -> np.ndarray:
        """Values in the shape of these lanes as one element for each lane."""
        wide = value if value.shape == self.shape else np.broadcast_to(value, self.shape)
        return wide.reshape(-1) if self.mask is None else wide[self.mask]

    def expand(self, value: np.ndarray) -> np.ndarray:
        """One element for each lane as values in the shape of these lanes."""
        if self.mask is None:
            return value.reshape(self.shape)
        out = np.zeros(self.shape, value.dtype)
        out[self.mask] = value
        return out

    def set_mask(self, whole: np.ndarray) -> None:
        """Set these lanes in a mask [C, T]."""
        if self.index is not None:
            whole.reshape(-1)[self.index] = True
        elif self.mask is None:
            whole[self.rows, self.columns] = True
        else:
            whole[self.rows, self.columns] |= self.mask

    def select(self, chosen: np.ndarray) -> LaneSet:
        """The lanes for which a bool value is true."""
        if chosen.shape == (1, 1):
            return self if chosen[0, 0] else self.make_empty()
        if self.index is not None:
            return self._make_from_indices(self.index[np.broadcast_to(chosen, self.shape)[0]])
        if self.mask is not None:
            return self.within(self.mask & chosen)
        if chosen.shape[0] == 1 or chosen.shape[1] == 1:
            result = self._select_contiguous(chosen.reshape(-1), chosen.shape[0] > 1)
            if result is not None:
                return result
        return self.within(np.broadcast_to(chosen, self.shape))

    def _select_contiguous(self, chosen: np.ndarray, of_rows: bool) -> LaneSet | None:
        """Whole rows or columns, if they are adjacent."""
        positions = np.flatnonzero(chosen)
        if not len(positions):
            return self.make_empty()
        first, last = int(positions[0]), int(positions[-1]) + 1
        if last - first != len(positions):
            return None
        if of_rows:
            return LaneSet(self.extent, slice(self.rows.start + first, self.rows.start + last), self.columns)
        return LaneSet(self.extent, self.rows, slice(self.columns.start + first, self.columns.start + last))

    def make_empty(self) -> LaneSet:
        """No lanes."""
        return self._make_from_indices(np.empty(0, np.int64))

    def _make_from_indices(self, index: np.ndarray) -> LaneSet:
        return LaneSet(self.extent, slice(0, 0), slice(0, 0), None, index)

    def within(self, mask: np.ndarray) -> LaneSet:
        """The lanes set in a mask over the rectangle, in the smallest form."""
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        if not len(rows):
            return self.make_empty()
        top, left = int(rows[0]), int(columns[0])
        part = mask[top : int(rows[-1]) + 1, left : int(columns[-1]) + 1]
        top, left, n = top + self.rows.start, left + self.columns.start, int(np.count_nonzero(part))
        across, down = slice(left, left + part.shape[1]), slice(top, top + part.shape[0])
        if n == part.size:
            return LaneSet(self.extent, down, across)
        if n * _SPARSE >= part.size:
            return LaneSet(self.extent, down, across, part)
        r, c = np.nonzero(part)
        return self._make_from_indices((r + top) * self.extent[1] + (c + left))

    def __or__(self, other: LaneSet) -> LaneSet:
        if not other.count or not self.count:
            return self if self.count else other
        mask = np.zeros(self.extent, bool)
        self.set_mask(mask)
        other.set_mask(mask)
        return make_lanes_from_mask(mask)


def make_all_lanes(extent: tuple[int, int]) -> LaneSet:
    """All lanes of C CTAs of T threads.

    >>> lanes = make_all_lanes((2, 4)).select(np.array([[True, True, False, False]]))
    >>> lanes.plain, lanes.shape, lanes.flat.tolist()
    (True, (2, 2), [0, 1, 4, 5])
    """
    return LaneSet(extent, slice(0, extent[0]), slice(0, extent[1]))


def make_lanes_from_mask(mask: np.ndarray) -> LaneSet:
    """The lanes set in a mask [C, T]."""
    return make_all_lanes((mask.shape[0], mask.shape[1])).within(mask)


def make_lanes_from_indices(index: np.ndarray, extent: tuple[int, int]) -> LaneSet:
    """The lanes with these flat indices."""
    mask = np.zeros(extent, bool)
    mask.reshape(-1)[index] = True
    return make_lanes_from_mask(mask)


def make_single_lane(lane: int, extent: tuple[int, int]) -> LaneSet:
    """One lane."""
    return LaneSet(extent, slice(0, 0), slice(0, 0), None, np.array([lane]))
