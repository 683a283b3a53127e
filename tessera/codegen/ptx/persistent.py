"""Programs as a loop: as many blocks of threads as the GPU runs at once, each working through its share of the grid.

Unless it is given, the order is such that programs near each other in time share rows and columns: bands of `BAND`
places along the first axis, walked along the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.codegen.ptx.order import Order
from tessera.codegen.ptx.text import Text

BAND = 8


class Persistent:
    """The loop over a grid's programs, while its body is emitted."""

    def __init__(self, text: Text, grid: Sequence[int], order: Order | None = None) -> None:
        self.text, self.grid, self.order = text, tuple(grid), order
        self.total = math.prod(self.grid)
        self._places: list[str] = []

    def size(self, axis: int) -> int:
        """The programs along an axis."""
        return self.grid[axis] if axis < len(self.grid) else 1

    def place(self, axis: int) -> str:
        """This program's place along an axis, as an index."""
        return self._places[axis] if axis < len(self._places) else "0"

    def begin(self) -> tuple[str, str, str]:
        """Begin the loop; what `end` needs."""
        text = self.text
        number = text.let("mov.u32", "b32", "%ctaid.x")
        head, done = text.new_label("program"), text.new_label("last")
        text.label(head)
        text.do(f"bra {done}", guard=text.let("setp.ge.u32", "pred", number, self.total))
        self._places = [text.let("cvt.u64.u32", "b64", each) for each in self._split(number)]
        return number, head, done

    def end(self, loop: tuple[str, str, str]) -> None:
        """End the loop."""
        number, head, done = loop
        step = self.text.let("mov.u32", "b32", "%nctaid.x")
        self.text.do("add.u32", number, number, step)
        self.text.do(f"bra {head}")
        self.text.label(done)

    def _split(self, number: str) -> list[str]:
        """A program's number as its places."""
        text = self.text
        if self.order is not None:
            return self._ordered(number, self.order)
        if len(self.grid) == 1:
            return [number]
        first, second = self.grid[:2]
        outer: list[str] = []
        rest = number
        if len(self.grid) == 3:
            outer = [text.let("div.u32", "b32", number, first * second)]
            rest = text.let("rem.u32", "b32", number, first * second)
        band = text.let("div.u32", "b32", rest, BAND * second)
        inside = text.let("rem.u32", "b32", rest, BAND * second)
        begin = text.let("mul.lo.u32", "b32", band, BAND)
        # The last band may be narrower.
        narrow = text.let("min.u32", "b32", text.let("sub.u32", "b32", first, begin), BAND)
        row = text.let("add.u32", "b32", begin, text.let("rem.u32", "b32", inside, narrow))
        return [row, text.let("div.u32", "b32", inside, narrow), *outer]

    def _ordered(self, number: str, order: Order) -> list[str]:
        """The places in a given order of the axes."""
        *axes, last = order.axes
        found = [""] * len(self.grid)
        total = math.prod(self.grid[a] for a in axes)
        section = order.section or total
        rest, inside = self._divided(number, section)
        outer, found[last] = self._divided(rest, self.grid[last])
        first = self.text.let("mad.lo.u32", "b32", outer, section, inside)
        for axis in axes:
            first, found[axis] = self._divided(first, self.grid[axis])
        if order.falling:
            found[last] = self.text.let("sub.u32", "b32", self.grid[last] - 1, found[last])
        return found

    def _divided(self, number: str, by: int) -> tuple[str, str]:
        """A quotient and what it leaves."""
        return tuple(self.text.let(f"{op}.u32", "b32", number, by) for op in ("div", "rem"))  # type: ignore[return-value]
