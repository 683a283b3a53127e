"""Programs as a loop: as many blocks of threads as the GPU runs at once, each working through its share of the grid.

Unless it is given, the order is such that programs near each other in time share rows and columns: bands of `BAND`
places along the first axis, walked along the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tessera.codegen.ptx.passes.order import Order
from tessera.codegen.ptx.text import Text

if TYPE_CHECKING:
    from tessera.codegen.ptx.entries.cluster import Cluster
    from tessera.codegen.ptx.team import Team

BAND = 8


class Persistent:
    """The loop over a grid's programs, while its body is emitted."""

    def __init__(
        self, text: Text, grid: Sequence[int], order: Order | None = None, cluster: Cluster | None = None,
        team: Team | None = None,
    ) -> None:  # fmt: skip
        self.text, self.order, self.cluster = text, order, cluster
        self.team = team if team is not None and team.teams > 1 else None  # of those that take programs in turn
        self.sizes = tuple(grid)
        # What is walked: of a cluster's programs the first.
        each = [cluster.size if cluster is not None and axis == cluster.axis else 1 for axis in range(len(grid))]
        self.grid = tuple(n // c for n, c in zip(grid, each, strict=True))
        self.total, self.band = math.prod(self.grid), BAND // each[0]
        self._places: list[str] = []

    def size(self, axis: int) -> int:
        """The programs along an axis."""
        return self.sizes[axis] if axis < len(self.sizes) else 1

    def place(self, axis: int) -> str:
        """This program's place along an axis, as an index."""
        return self._places[axis] if axis < len(self._places) else "0"

    def begin(self) -> tuple[str, str, str]:
        """Begin the loop; what `end` needs."""
        text = self.text
        number = text.let("mov.u32", "b32", "%ctaid.x" if self.cluster is None else "%clusterid.x")
        if self.team is not None:
            step = text.let("mov.u32", "b32", "%nctaid.x")
            text.do("mad.lo.u32", number, self.team.index, step, number)
        head, done = text.new_label("program"), text.new_label("last")
        text.label(head)
        text.do(f"bra {done}", guard=text.let("setp.ge.u32", "pred", number, self.total))
        self._places = self._wide(number)
        return number, head, done

    @contextmanager
    def at(self, number: str) -> Iterator[None]:
        """Inside, places are those of another program."""
        before, self._places = self._places, self._wide(number)
        yield
        self._places = before

    def _wide(self, number: str) -> list[str]:
        """A program's places as indices."""
        places = self._split(number)
        if self.cluster is not None:
            rank = self.text.let("mov.u32", "b32", "%cluster_ctarank")
            first = places[self.cluster.axis]
            places[self.cluster.axis] = self.text.let("mad.lo.u32", "b32", first, self.cluster.size, rank)
        return [self.text.let("cvt.u64.u32", "b64", each) for each in places]

    def end(self, loop: tuple[str, str, str]) -> None:
        """End the loop."""
        number, head, done = loop
        step = self.text.let("mov.u32", "b32", "%nctaid.x" if self.cluster is None else "%nclusterid.x")
        if self.team is not None:
            step = self.text.let("mul.lo.u32", "b32", step, self.team.teams)
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
        band = text.let("div.u32", "b32", rest, self.band * second)
        inside = text.let("rem.u32", "b32", rest, self.band * second)
        begin = text.let("mul.lo.u32", "b32", band, self.band)
        # The last band may be narrower.
        narrow = text.let("min.u32", "b32", text.let("sub.u32", "b32", first, begin), self.band)
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
