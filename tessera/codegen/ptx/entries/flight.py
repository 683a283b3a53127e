"""Products under way: committed in the order of the program, waited for where their sums are first used.

A stage of the ring is given back when the product that reads it is done. A loop may end with products under way: their
sums have registers that the loop carries. It then begins with them, or with none: to wait until no more than so many
are under way, which is all that is asked for, is right for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tessera.codegen.ptx.entries.warpgroup import release
from tessera.codegen.ptx.ops import settled, streamed
from tessera.codegen.ptx.types import is_immediate
from tessera.ir.core import Block, Node, Value
from tessera.ops import elementwise

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

NONE = -1  # the stage of what is not under way
FRESH = (elementwise.mul, elementwise.add, elementwise.sub, streamed)  # whose results have registers of their own


@dataclass(frozen=True)
class Entry:
    """A product under way: its sums, the register with its stage, whether that may be none, and where its left side
    lies: in words of registers, or in memory."""

    sums: Value
    stage: str
    maybe: bool = False
    words: bool = False


class Flight:
    """The products under way of one kernel, in the order of their commitment."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.under_way: list[Entry] = []
        self.targets: dict[Value, tuple[Value, str]] = {}  # sums that a loop carries: its parameter, and a stage
        nodes = list(kernel.function.body.walk())
        self.uses = Counter(v for n in nodes for v in (*n.args, *(v for r in n.regions for v in r.results)))
        params = {p for n in nodes for r in n.regions for p in r.params}
        self._made = params | {v for n in nodes if n.op in FRESH for v in n.results}

    def settle(self, values: Iterable[Value]) -> None:
        """Wait for the products that give some of these values, and so for all before them."""
        wanted = set(values)
        places = [i for i, e in enumerate(self.under_way) if e.sums in wanted]
        if places:
            self._wait(places[-1] + 1)

    def settle_words(self) -> None:
        """Wait for the products that read words of registers."""
        self.settle(e.sums for e in self.under_way if e.words)

    def settle_all(self) -> None:
        """Wait for every product."""
        if self.under_way:
            self._wait(len(self.under_way))

    def _wait(self, count: int) -> None:
        text, ring = self.kernel.text, self.kernel.ring
        assert ring is not None
        text.do("wgmma.wait_group.sync.aligned", len(self.under_way) - count)
        for e in self.under_way[:count]:
            some = text.let("setp.ge.s32", "pred", e.stage, 0) if e.maybe else ""
            release(self.kernel, ring, e.stage, some)
        del self.under_way[:count]

    def begun(self, node: Node, stage: str) -> None:
        """A product has been committed."""
        kept = self.targets.get(node.out)
        mine = self.kernel.text.let("mov.u32", "b32", stage) if kept is None else kept[1]
        if kept is not None:
            self.kernel.text.do("mov.u32", mine, stage)
        words = node.args[0] not in self.kernel.stays
        self.under_way.append(Entry(node.out, mine, kept is not None, words))

    def in_place(self, v: Value) -> bool:
        """Whether a block's registers may be written: nobody reads them again, and they are no one else's."""
        held = self.kernel.values[v]
        own = v in self._made and self.uses[v] == 1 and len(set(held)) == len(held)
        return own and not any(is_immediate(x) or x.startswith("0f") for x in held)

    def enter(self, loop: Node) -> Mapping[int, tuple[str, ...]]:
        """A loop begins: the registers of what it carries that stays under way, by place."""
        (body,) = loop.regions
        carried, flying = _carried(body), _flying(body)
        inits = [loop.args[3 + i] for i in flying]
        before = [e.sums for e in self.under_way]
        if before != inits or any(self.uses[v] != 1 for v in before):
            self.settle_all()
        stages = {i: e.stage for i, e in zip(flying, self.under_way, strict=False)}
        kept = {i: self.kernel.values[loop.args[3 + i]] for i in stages}
        words = [n.out for n in body.nodes if n.op is streamed and n.args[0] not in self.kernel.stays]
        for i in carried:
            stages.setdefault(i, self.kernel.text.let("mov.u32", "b32", NONE))
            self.targets[body.results[i]] = (body.params[i + 1], stages[i])
        self.under_way = [Entry(body.params[i + 1], stages[i], True, body.results[i] in words) for i in flying]
        return kept

    def round_ends(self, loop: Node) -> None:
        """At a round's end the same is under way as at its begin."""
        (body,) = loop.regions
        sums = [body.results[i] for i in _flying(body)]
        if [e.sums for e in self.under_way] != sums:
            self.settle_all()
            for v in sums:
                self.kernel.text.do("mov.u32", self.targets[v][1], NONE)
            self.under_way = [Entry(v, self.targets[v][1], True) for v in sums]

    def leave(self, loop: Node) -> None:
        """A loop is over: what is under way are its results."""
        (body,) = loop.regions
        names = {body.results[i]: loop.results[i] for i in _flying(body)}
        self.under_way = [replace(e, sums=names[e.sums]) for e in self.under_way]


def _carried(body: Block) -> list[int]:
    """The places of a loop's results that are products' sums and whose values before nobody reads after that."""
    found = []
    for place, node in enumerate(body.nodes):
        if node.op is streamed and list(body.results).count(node.out) == 1:
            i = body.results.index(node.out)
            after = {v for n in body.nodes[place + 1 :] for v in n.args} | set(body.results)
            inner = {v for n in body.nodes[place + 1 :] for r in n.regions for m in r.walk() for v in m.args}
            if body.params[i + 1] not in after | inner:
                found.append(i)
    return found


def _flying(body: Block) -> list[int]:
    """Those of these places whose products are not waited for in the round that begins them."""
    done = {n.args[0] for n in body.nodes if n.op is settled}
    return [i for i in _carried(body) if body.results[i] not in done]
