"""Which bytes of a program's own buffers hold a value: kept from launch to launch, however views of them are cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(eq=False)
class _Area:
    low: int
    bytes: np.ndarray

    @property
    def high(self) -> int:
        return self.low + self.bytes.size


class Written:
    """Stretches of memory, none overlapping another; a bool for each byte."""

    def __init__(self) -> None:
        self.areas: list[_Area] = []

    def view(self, low: int, high: int, unit: int) -> np.ndarray:
        """A bool for each `unit` bytes from `low` to before `high`, that one may set; `spread` then makes it count."""
        area = self.cover(low, high)
        return area.bytes[low - area.low : high - area.low : unit]

    def spread(self, low: int, high: int, unit: int) -> None:
        """Count what was set in a view for all bytes of its cells."""
        area = self.cover(low, high)
        cells = area.bytes[low - area.low : high - area.low].reshape(-1, unit)
        cells[cells[:, 0]] = True

    def mark(self, low: int, high: int) -> None:
        """Count all bytes as written."""
        area = self.cover(low, high)
        area.bytes[low - area.low : high - area.low] = True

    def cover(self, low: int, high: int) -> _Area:
        """The area that holds a stretch; those that it only meets become one."""
        met = [a for a in self.areas if a.low < high and low < a.high]
        if len(met) == 1 and met[0].low <= low and high <= met[0].high:
            return met[0]
        first, last = min([low, *(a.low for a in met)]), max([high, *(a.high for a in met)])
        whole = _Area(first, np.zeros(last - first, bool))
        for each in met:
            whole.bytes[each.low - first : each.high - first] = each.bytes
        self.areas = [a for a in self.areas if a not in met] + [whole]
        return whole
