"""Places and rectangles on the fabric."""

from __future__ import annotations

from typing import NamedTuple


class IntVector(NamedTuple):
    """A place: column and row."""

    x: int
    y: int


class IntRectangle(NamedTuple):
    """The places from the upper left one up to, and without, the lower right one.

    >>> IntRectangle(IntVector(0, 0), IntVector(3, 2)).size
    (3, 2)
    """

    upper_left: IntVector
    lower_right: IntVector

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        return self.lower_right.x - self.upper_left.x, self.lower_right.y - self.upper_left.y
