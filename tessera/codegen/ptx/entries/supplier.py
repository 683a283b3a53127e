"""An entry whose programs are a loop with blocks brought ahead: a ring of stages in shared memory, filled by copies.

All threads work on a program. When all have read what a stage holds, one of them begins the copies of the program
that is to find it there next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.codegen.ptx.blocks.exchange import runs
from tessera.codegen.ptx.entries.persistent import Persistent
from tessera.codegen.ptx.entries.ring import Ring
from tessera.codegen.ptx.entry import Entry, bind_parameters, finished
from tessera.codegen.ptx.kernel import Kernel
from tessera.codegen.ptx.ops import supplied
from tessera.codegen.ptx.passes.arrange import arrange
from tessera.codegen.ptx.passes.needed import needed
from tessera.codegen.ptx.passes.order import Order
from tessera.codegen.ptx.passes.supply import Supply, bytes_of
from tessera.codegen.ptx.scalars import words
from tessera.codegen.ptx.team import Team
from tessera.codegen.ptx.text import Files, Text
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node

COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def supplied_entry(
    supply: Supply, threads: int, vector: int, files: Files | None, grid: Sequence[int], apart: bool
) -> Entry:
    """A function with `supplied` blocks as an entry."""
    text = Text(files)
    team = Team(text, threads, 1)
    kernel = Kernel(arrange(supply.function, threads, vector), text, team, vector, grid, apart)
    kernel.rank = len(grid)
    bind_parameters(kernel, ())
    order = Order(tuple(reversed(range(len(grid))))) if len(grid) > 1 else None
    kernel.persistent = Persistent(text, grid, order)
    kernel.supplier = Supplier(kernel, supply.stages)
    kernel.supplier.begin()
    loop = kernel.persistent.begin()
    kernel.supplier.number = loop[0]
    kernel.hazards.around(kernel.function.body)
    kernel.run(kernel.function.body)
    kernel.persistent.end(loop)
    text.line("ret")
    return finished(kernel, programs=math.prod(grid))


class Supplier:
    """The stages, and who fills them. `number` is the register with the number of the program under way."""

    number = ""

    def __init__(self, kernel: Kernel, stages: int) -> None:
        self.kernel, self.text, self.stages = kernel, kernel.text, stages
        nodes = [n for n in kernel.function.body.nodes if n.op is supplied]
        self.moving = [n for n in nodes if not n.attrs["same"]]
        self.still = [n for n in nodes if n.attrs["same"]]
        self.needed = needed(kernel.function, [v for n in nodes for v in n.args[1:]])
        self.ring = Ring(self.text, kernel.room, stages, _total(self.moving), 1)
        self.kept = Ring(self.text, kernel.room, 1, _total(self.still), 1) if self.still else None
        self.walker = self.ring.walk(0)
        self.unread = len(self.moving)

    def begin(self) -> None:
        """One thread sets up the barriers and begins the first copies."""
        text, team, persistent = self.text, self.kernel.team, self.kernel.persistent
        assert persistent is not None
        self.ring.begin(team.thread)
        if self.kept is not None:
            self.kept.begin(team.thread)
        text.do("bar.sync", 0)
        ready = text.new_label("supplied")
        text.do(f"bra {ready}", guard=text.let("setp.ne.u32", "pred", team.thread, 0))
        number, step = (text.let("mov.u32", "b32", word) for word in ("%ctaid.x", "%nctaid.x"))
        for stage in range(self.stages):
            buffer = text.let("add.u32", "b32", self.ring.base, stage * self.ring.size)
            self._fill(number, buffer, text.let("add.u32", "b32", self.ring.full, 8 * stage))
            number = text.let("add.u32", "b32", number, step)
        if self.kept is not None:
            with persistent.at(text.let("mov.u32", "b32", 0)):
                self._copies(self.still, self.kept.base, self.kept.full)
        text.label(ready)

    def take(self, node: Node) -> None:
        """A block in registers. Behind the last one of a program its stage is filled for another."""
        still = node.attrs["same"]
        ring, walker = (self.kept, self.kept.walk(0)) if still and self.kept else (self.ring, self.walker)
        walker.wait(ring.full)
        place = _place(self.still if still else self.moving, node)
        base = self.text.let("add.u32", "b32", walker.buffer(), place)
        dtype, found = node.args[0].type.dtype, []  # type: ignore[union-attr]
        for run in runs(self.kernel, dtype, self.kernel.layout(node.out), base, once=False):
            found += words.load(self.text, "shared", dtype, run)
        self.kernel.values[node.out] = tuple(found)
        self.unread -= 0 if still else 1
        if not still and not self.unread:
            self._next()

    def _next(self) -> None:
        """Everyone has read the stage: it is filled for the program that comes when all stages have been read."""
        text, team = self.text, self.kernel.team
        # Loads may wait behind stores when a barrier does not: copies must not overtake them.
        text.do("fence.proxy.async.shared::cta")
        self.kernel.meet()
        behind = text.new_label("behind")
        text.do(f"bra {behind}", guard=text.let("setp.ne.u32", "pred", team.thread, 0))
        step = text.let("mov.u32", "b32", "%nctaid.x")
        number = text.let("mad.lo.u32", "b32", step, self.stages, self.number)
        full = text.let("mad.lo.u32", "b32", self.walker.stage, 8, self.ring.full)
        self._fill(number, self.walker.buffer(), full)
        text.label(behind)
        self.walker.advance()

    def _fill(self, number: str, buffer: str, full: str) -> None:
        """Begin the copies of what a program loads, if there is such a program."""
        persistent = self.kernel.persistent
        assert persistent is not None
        none = self.text.new_label("none")
        self.text.do(f"bra {none}", guard=self.text.let("setp.ge.u32", "pred", number, persistent.total))
        with persistent.at(number):
            self._copies(self.moving, buffer, full)
        self.text.label(none)

    def _copies(self, nodes: Sequence[Node], buffer: str, full: str) -> None:
        """Begin the copies of some blocks at the places that they have in the program numbered so."""
        kernel, text, before = self.kernel, self.text, dict(self.kernel.values)
        for each in self.needed:
            kernel.emit(each)
        text.do("mbarrier.arrive.expect_tx.shared::cta.b64", "_", f"[{full}]", _total(nodes))
        for node in nodes:
            target = text.let("add.u32", "b32", buffer, _place(nodes, node))
            text.do(COPY, f"[{target}]", f"[{self._address(node)}]", bytes_of(node), f"[{full}]")
        kernel.values = before

    def _address(self, node: Node) -> str:
        """Where a block begins in memory."""
        memory = self.kernel.memories[node.args[0]]
        total = memory.base
        for v, step in zip(node.args[1:], memory.steps, strict=True):
            if (start := self.kernel.one(v)) != "0":
                total = self.text.let("mad.lo.s64", "b64", start, step, total)
        return total


@visit(supplied)
def _(kernel: Kernel, node: Node) -> None:
    assert kernel.supplier is not None
    kernel.supplier.take(node)


def _total(nodes: Sequence[Node]) -> int:
    return sum(map(bytes_of, nodes))


def _place(nodes: Sequence[Node], node: Node) -> int:
    """Where a block lies among some, one after the other."""
    return sum(bytes_of(n) for n in nodes[: list(nodes).index(node)])
