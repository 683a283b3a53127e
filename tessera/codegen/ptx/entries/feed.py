"""The thread that fetches for `streamed` products: it walks a function's loops and fills a stage for each of them.

What it computes is what the places are computed from, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tessera.codegen.ptx.entries.fetch import INNER, Map, copy_box
from tessera.codegen.ptx.entries.ring import Walker
from tessera.codegen.ptx.ops import resident, streamed
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.needed import needed
from tessera.codegen.ptx.types import size
from tessera.ir.core import Block, Function, Node, Value
from tessera.ops import control

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

FETCHED = (resident, streamed)


def reference(node: Node) -> Value:
    """The memory that a node reads."""
    return node.args[1] if node.op is streamed else node.args[0]


def starts(node: Node) -> tuple[Value, ...]:
    """Where its block begins."""
    return node.args[1:] if node.op is resident else node.args[3 if node.attrs["summed"] else 2 :]


def lies(node: Node) -> tuple[int, int]:
    """The rows and columns of its block in memory."""
    if node.op is resident:
        return sizes(node.out)[0], sizes(node.out)[1]
    depth, columns = node.attrs["block"]
    return (columns, depth) if node.attrs["flipped"] else (depth, columns)


def fetched_bytes(node: Node) -> int:
    """The bytes of its block."""
    rows, columns = lies(node)
    return rows * columns * size(reference(node).type.dtype)  # type: ignore[union-attr]


def maps_of_streams(function: Function) -> dict[Node, Map]:
    """The map that each node is fetched by: boxes of a block's rows, one row of the swizzle wide."""
    made: dict[tuple[int, tuple[int, ...]], Map] = {}
    found = {}
    for node in function.body.walk():
        if node.op in FETCHED:
            ref = reference(node)
            box = (*(1,) * (ref.type.rank - 2), lies(node)[0], INNER)  # type: ignore[union-attr]
            param = function.params.index(ref)
            found[node] = made.setdefault((param, box), Map(len(made), param, box))
    return found


class Feed:
    """The walk: `maps` say what to fetch by, and each `resident` has a ring of its own."""

    def __init__(self, kernel: Kernel, walker: Walker, maps: Mapping[Node, Map], own: Mapping[Node, Walker]) -> None:
        self.kernel, self.text, self.walker, self.maps, self.own = kernel, kernel.text, walker, maps, own
        self.needed = _needed(kernel.function)

    def run(self, block: Block) -> None:
        """Fetch what a block reads, in order."""
        for node in block.nodes:
            if node.op in FETCHED:
                self._fill(node)
            elif node.op is control.for_ and any(n.op in FETCHED for n in node.regions[0].walk()):
                self._loop(node)
            elif node in self.needed:
                self.kernel.emit(node)

    def _loop(self, node: Node) -> None:
        text = self.text
        lower, upper, step = (self.kernel.one(v) for v in node.args[:3])
        index = text.let("mov.b64", "b64", lower)
        head, done = text.new_label("fetch"), text.new_label("fetched")
        text.label(head)
        text.do(f"bra {done}", guard=text.let("setp.ge.s64", "pred", index, upper))
        self.kernel.values[node.regions[0].params[0]] = (index,)
        self.run(node.regions[0])
        text.do("add.s64", index, index, step)
        text.do(f"bra {head}")
        text.label(done)

    def _fill(self, node: Node) -> None:
        """Wait until a stage is empty, and begin the copies into it."""
        walker, text = self.own.get(node, self.walker), self.text
        walker.wait(walker.ring.empty)
        full = text.let("mad.lo.u32", "b32", walker.stage, 8, walker.ring.full)
        text.do("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{full}]", fetched_bytes(node))
        wide = [self.kernel.one(v) for v in starts(node)]
        places = [text.let("cvt.u32.u64", "b32", x) if x.startswith("%") else x for x in wide]
        buffer, (rows, columns) = walker.buffer(), lies(node)
        each = rows * INNER * size(reference(node).type.dtype)  # type: ignore[union-attr]
        for part in range(columns // INNER):
            column = text.let("add.s32", "b32", places[-1], part * INNER) if part else places[-1]
            copy_box(self.kernel, self.maps[node].index, buffer, part * each, [*places[:-1], column], full)
        walker.advance()


def _needed(function: Function) -> set[Node]:
    """The nodes that places and the bounds of loops are computed by."""
    wanted: list[Value] = []
    for node in function.body.walk():
        if node.op in FETCHED:
            wanted += starts(node)
        elif node.op is control.for_:
            wanted += node.args[:3]
    return set(needed(function, wanted))
