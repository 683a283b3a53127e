"""Sums of products by multiply-add: both sides in memory that the team shares, a square of sums in each thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tessera.codegen.ptx.blocks.exchange import row_major, runs, space, thread_address
from tessera.codegen.ptx.hazards import READ, WRITE
from tessera.codegen.ptx.layout import Sizes
from tessera.codegen.ptx.memory import Run
from tessera.codegen.ptx.scalars import words
from tessera.codegen.ptx.scalars.convert import convert
from tessera.codegen.ptx.types import register_class, size, word
from tessera.ir.core import Node

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

UNROLL = 4
ALIGN = 16


class Product:
    """One product under emission."""

    def __init__(self, kernel: Kernel, node: Node) -> None:
        self.kernel, self.text, self.node = kernel, kernel.text, node
        a, b = self.sides = node.args[-2:]
        self.dtypes = [v.type.dtype for v in self.sides]  # type: ignore[union-attr]
        self.wide = a.type.accumulate  # type: ignore[union-attr]
        self.left, self.right = kernel.layout(a).shape, kernel.layout(b).shape
        self.layout = kernel.layout(node.out)
        self.k = self.left[-1]
        each = size(self.dtypes[0])  # both are as large
        self.offset = -(-math.prod(self.left) * each // ALIGN) * ALIGN
        self.base = kernel.room.exchange(self.offset + math.prod(self.right) * each)

    def put(self) -> None:
        """Both sides into the exchange."""
        kernel = self.kernel
        if kernel.hazards.exchange(WRITE):
            kernel.team.meet(self.text)
        for v, at, dtype in zip(self.sides, (0, self.offset), self.dtypes, strict=True):
            for run in runs(kernel, dtype, kernel.layout(v), self.base, once=True):
                moved = Run(run.first, run.count, run.address, run.offset + at, run.guards)
                part = kernel.values[v][run.first : run.first + run.count]
                words.store(self.text, space(kernel), dtype, moved, part)
        if kernel.hazards.exchange(READ):
            kernel.team.meet(self.text)

    def run(self) -> None:
        """The sums: a loop along the axis that the sides share, some steps a round, then what is left."""
        self.sums = self.begun()
        steps = row_major(self.left, size(self.dtypes[0])), row_major(self.right, size(self.dtypes[1]))
        places = [self._address(s, a, keep) for s, a, keep in zip(steps, (0, self.offset), (-2, -1), strict=True)]
        rounds = self.k // UNROLL
        if rounds > 1:
            self._loop(places, steps, rounds)
        else:
            rounds = 0
        for k in range(rounds * UNROLL, self.k):
            behind = k - rounds * UNROLL if rounds > 1 else k
            self._step(places, steps, behind)

    def begun(self) -> list[str]:
        """Registers of their own that hold what the products are added to."""
        kind = register_class(self.wide)
        given = self.kernel.values[self.node.args[0]] if len(self.node.args) > 2 else ()
        first = given or (words.zero(kind),) * self.layout.count
        return [self.text.let(f"mov.{kind}", kind, x) for x in first]

    def _address(self, steps: Sizes, at: int, keep: int) -> str:
        """A register of its own with the address of what a thread's first element needs: its row or its column."""
        rank = len(steps)
        used = tuple(0 if axis >= rank - 2 and axis != rank + keep else s for axis, s in enumerate(steps))
        total = thread_address(self.kernel, self.layout, used, self.base)
        kind = "b64" if self.kernel.room.own else "b32"
        return self.text.let(f"add.s{kind[1:]}", kind, total, at)

    def _loop(self, places: list[str], steps: Sequence[Sizes], rounds: int) -> None:
        text, head = self.text, self.text.new_label("dot")
        count = text.let("mov.u32", "b32", rounds)
        text.label(head)
        for k in range(UNROLL):
            self._step(places, steps, k)
        form = "s64" if self.kernel.room.own else "s32"
        for place, step in zip(places, (steps[0][-1], steps[1][-2]), strict=True):
            text.do(f"add.{form}", place, place, UNROLL * step)
        text.do("sub.s32", count, count, 1)
        text.do(f"bra {head}", guard=text.let("setp.ne.s32", "pred", count, 0))

    def _step(self, places: Sequence[str], steps: Sequence[Sizes], k: int) -> None:
        """One place of the shared axis: a column of the left side times a row of the right one."""
        row, column = len(self.layout.shape) - 2, len(self.layout.shape) - 1
        left = self._loaded(0, places[0], steps[0], k * steps[0][-1])
        right = self._loaded(1, places[1], steps[1], k * steps[1][-2])
        form = word(self.wide)
        multiply = "fma.rn" if self.wide.is_float else "mad.lo"
        for total, place in zip(self.sums, self.layout.offsets, strict=True):
            a, b = left[place[: row + 1]], right[place[:row] + place[column:]]
            self.text.do(f"{multiply}.{form}", total, a, b, total)

    def _loaded(self, side: int, base: str, steps: Sizes, at: int) -> dict[Sizes, str]:
        """The elements of a side that this thread's registers need, by their place along the leading axes and one more:
        rows of the left one, columns of the right."""
        outer = len(self.layout.shape) - 2
        axis = outer + side
        found: dict[Sizes, str] = {}
        for place in self.layout.offsets:
            key = (*place[:outer], place[axis])
            if key not in found:
                offset = at + sum(n * s for n, s in zip(key[:-1], steps, strict=False)) + key[-1] * steps[axis]
                found[key] = self._element(side, base, offset, place)
        return found

    def _element(self, side: int, base: str, offset: int, place: Sizes) -> str:
        axes = (*range(len(place) - 2), len(place) - 2 + side)
        inside = [self.kernel.team.within(self.layout, a, place[a]) for a in axes]
        guard = ""
        for each in inside:
            guard = self.text.let("and.pred", "pred", guard, each) if guard and each else guard or each
        run = Run(0, 1, base, offset, (guard,))
        (x,) = words.load(self.text, space(self.kernel), self.dtypes[side], run)
        return convert(self.text, self.dtypes[side], self.wide, x)
