"""The warp groups' part of `streamed` products: instructions that go on while other work is done.

The left side is a block in shared memory, or words in registers that nobody writes meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.ptx.entries.feed import lies
from tessera.codegen.ptx.entries.fetch import INNER
from tessera.codegen.ptx.entries.ring import Walker
from tessera.codegen.ptx.entries.warpgroup import (
    EIGHT_ROWS,
    GROUP,
    HEIGHT,
    LAST,
    ROW,
    ROWS_FIRST,
    STEP,
    SWIZZLE,
    descriptor,
    moved,
    own_rows,
    release,
)
from tessera.codegen.ptx.ops import awaited, pairs, released, resident, settled, streamed
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.products import named
from tessera.codegen.ptx.scalars.words import half_words
from tessera.codegen.ptx.types import size
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

ZERO = ("0f00000000",)


@visit(resident)
def _(kernel: Kernel, node: Node) -> None:
    walker = kernel.kept[node]
    walker.wait(walker.ring.full)
    begin = descriptor(kernel.text, walker.buffer(), own_rows(kernel.team), ROWS_FIRST)
    kernel.stays[node.out] = (walker, begin)
    kernel.values[node.out] = ()


@visit(released)
def _(kernel, node):
    kernel.flight.settle_all()
    walker, _ = kernel.stays[node.args[0]]
    release(kernel, walker.ring, walker.stage)
    walker.advance()


@visit(awaited)
def _(kernel, node):
    # Waiting in a loop of its own keeps an assembler from waiting for products before the work beside them.
    kernel.walker.wait(kernel.walker.ring.full)


@visit(settled)
def _(kernel, node):
    kernel.flight.settle(node.args)


@visit(pairs)
def _(kernel, node):
    (x,) = node.args
    kernel.flight.settle_words()  # what instructions under way read is not to be written
    held, index = kernel.values[x], kernel.layout(x).index
    places = ((r, 2 * c) for r, c in kernel.layout(node.out).offsets)
    kernel.values[node.out] = tuple(
        half_words(kernel.text, x.type.dtype, held[index[r, c]], held[index[r, c + 1]]) for r, c in places
    )


@visit(streamed)
def _(kernel, node):
    Streamed(kernel, node).run()


class Streamed:
    """One such product under emission."""

    def __init__(self, kernel: Kernel, node: Node) -> None:
        assert kernel.walker is not None
        self.kernel, self.text, self.node = kernel, kernel.text, node
        self.walker: Walker = kernel.walker
        self.flight = kernel.flight
        self.dtype = node.args[1].type.dtype
        self.depth, self.columns = node.attrs["block"]
        self.groups = kernel.team.threads // GROUP
        self.parts = sizes(node.out)[0] // (HEIGHT * self.groups)

    def run(self) -> None:
        """Wait for the stage, commit the instructions, and go on."""
        text, node = self.text, self.node
        adds, sums = self._sums()
        self.walker.wait(self.walker.ring.full)
        text.do("wgmma.fence.sync.aligned")
        self._multiply(sums, adds)
        text.do("wgmma.commit_group.sync.aligned")
        self.kernel.values[node.out] = tuple(sums)
        self.flight.begun(node, self.walker.stage)
        self.walker.advance()

    def _sums(self) -> tuple[bool, list[str]]:
        """Whether there is something to add to, and the registers of the sums."""
        text, summed = self.text, self.node.attrs["summed"]
        held = self.kernel.values[self.node.args[2]] if summed else ()
        kept = self.flight.targets.get(self.node.out)
        if kept is not None:
            self.flight.settle([kept[0]])
            own = self.kernel.values[kept[0]]
            for d, x in zip(own, held, strict=False):
                if d != x:
                    text.do("mov.f32", d, x)
            return summed, list(own)
        if summed and self.flight.in_place(self.node.args[2]):
            return True, list(held)
        count = self.kernel.layout(self.node.out).count
        if set(held) <= set(ZERO):
            return False, [text.new("f32") for _ in range(count)]
        return True, [text.let("mov.f32", "f32", x) for x in held]

    def _multiply(self, sums: list[str], adds: bool) -> None:
        flipped, each = self.node.attrs["flipped"], len(sums) // self.parts
        rows, _ = lies(self.node)
        buffer = self.walker.buffer()
        # From 64 columns to the next there is a whole box where the sides' columns lie side by side.
        apart = ROWS_FIRST if flipped else SWIZZLE | (EIGHT_ROWS >> 4) << 32 | (rows * ROW >> 4) << 16
        right = descriptor(self.text, buffer, "0", apart)
        step = STEP // size(self.dtype)
        for k in range(0, self.depth, step):
            b = moved(self.text, right, self._along(k, rows) if flipped else k * ROW)
            for part in range(self.parts):
                own = sums[part * each : (part + 1) * each]
                self._instruction(own, self._left(k, part), b, adds or k > 0, flipped)

    def _along(self, k: int, rows: int) -> int:
        """The bytes to a place along the rows of boxes."""
        box, inside = divmod(k, INNER)
        return box * rows * ROW + inside * size(self.dtype)

    def _left(self, k: int, part: int) -> str:
        """The left side's part for some rows: a descriptor, or four words."""
        side = self.node.args[0]
        stays = self.kernel.stays.get(side)
        high = HEIGHT * self.groups * part
        if stays is not None:
            return moved(self.text, stays[1], self._along(k, sizes(side)[0]) + high * ROW)
        held, index = self.kernel.values[side], self.kernel.layout(side).index
        words = [held[index[high + down, k // 2 + across]] for across in (0, 4) for down in (0, 8)]
        return f"{{{', '.join(words)}}}"

    def _instruction(self, sums: list[str], a: str, b: str, add: bool, flipped: bool) -> None:
        form = f"wgmma.mma_async.sync.aligned.m64n{len(sums) * 2}{named(self.dtype, self.dtype)}"
        last = LAST[self.dtype] if not a.startswith("{") else LAST[self.dtype][:2]
        self.text.do(form, f"{{{', '.join(sums)}}}", a, b, int(add), *last, 0 if flipped else 1)
