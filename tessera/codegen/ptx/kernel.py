"""The state of emitting one tile function, and the walk over its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

from tessera.codegen.ptx.blocks import pointwise
from tessera.codegen.ptx.blocks.prints import Rounds
from tessera.codegen.ptx.entries.flight import Flight
from tessera.codegen.ptx.entries.persistent import Persistent
from tessera.codegen.ptx.entries.ring import Ring, Walker
from tessera.codegen.ptx.extras import Extras
from tessera.codegen.ptx.hazards import Hazards
from tessera.codegen.ptx.layout import Layout
from tessera.codegen.ptx.memory import Memory
from tessera.codegen.ptx.passes.arrange import Arranged
from tessera.codegen.ptx.room import Room
from tessera.codegen.ptx.scalars.policy import check_policy
from tessera.codegen.ptx.team import Team
from tessera.codegen.ptx.text import Text
from tessera.codegen.ptx.visit import visit
from tessera.codegen.ranges import Ranges
from tessera.errors import Location, TesseraError, UnsupportedOpError
from tessera.ir.core import Block, Node, Value
from tessera.ops import basic, control, shape

if TYPE_CHECKING:
    from tessera.codegen.ptx.blocks.slots import Lying, Slots
    from tessera.codegen.ptx.entries.cluster import Cluster
    from tessera.codegen.ptx.entries.supplier import Supplier

# What only names the registers of other values anew: it may come before pointwise ops that it does not use.
RENAMED = (basic.full, basic.broadcast_to, shape.iota)


class Kernel:
    """One tile function under emission: what registers hold each value, and where memory lies."""

    def __init__(
        self, arranged: Arranged, text: Text, team: Team, vector: int, grid: Sequence[int] | None, apart: bool
    ) -> None:
        self.vector, self.rank = vector, 1
        self.persistent: Persistent | None = None
        self.ring: Ring | None = None
        self.walker: Walker | None = None
        self.cluster: Cluster | None = None
        self.supplier: Supplier | None = None
        self.maps: tuple[str, ...] = ()
        self.unloads: dict[Node, str] = {}
        self.kept: dict[Node, Walker] = {}  # the rings of blocks that stay, and of these blocks
        self.stays: dict[Value, tuple[Walker, str]] = {}  # with the descriptor of its begin
        self.extras, self.rounds = Extras(text), Rounds(self)
        self.arch, self.ended = "sm_80", ""
        self.folded: tuple[int, ...] = ()  # the grid, where the hardware knows programs by number alone
        self.halves: set[int] = set()  # parameters of single bytes that are swapped two by two, and whose number is odd
        self.isa = (0, 0)  # the version of the instruction set, where one is needed that is newer than the least
        self.resident = 0  # blocks that registers must suffice for on one multiprocessor; 0: as the assembler likes
        self.function, self.layouts, self.text, self.team = arranged.function, arranged.layouts, text, team
        self.values: dict[Value, tuple[str, ...]] = {}
        self.memories: dict[Value, Memory] = {}
        self.slots: dict[Value, Slots] = {}
        self.lying: dict[Value, Lying] = {}  # blocks that stay where copies put them
        self.producers: dict[Value, Node] = {}
        self.ranges = Ranges(self.producers, grid)
        self.room = Room(team)
        self.hazards = Hazards(self.function, self.layouts, team, apart)
        self.used = _used(self.function.body)
        self.flight = Flight(self)  # products that go on while other work is done
        self._loc: Location = self.function.loc

    @contextmanager
    def at(self, node: Node) -> Iterator[None]:
        """Tie the lines emitted inside, and errors, to the node's place."""
        before, self._loc = self._loc, node.loc
        self.text.place(node.loc)
        try:
            check_policy(node)
            yield
        except TesseraError as error:
            raise error.at(node.loc) from None
        finally:
            self._loc = before
            self.text.place(before)

    def run(self, block: Block) -> None:
        """Emit the nodes of a block in order."""
        chain: list[Node] = []
        for node in block.nodes:
            if node.op.pointwise and visit.get(node.op) is None:
                self.producers.update(dict.fromkeys(node.results, node))
                chain.append(node)
                continue
            if node.op not in RENAMED or {n.out for n in chain} & set(node.args):
                self._end(chain)
            self.emit(node)
        self._end(chain)

    def _end(self, chain: list[Node]) -> None:
        """Emit the pointwise nodes that were put off, those of one layout together."""
        for _, group in groupby(chain, lambda node: self.layout(node.out).count):
            nodes = list(group)
            self._settle(nodes)
            pointwise.emit_chain(self, nodes)
        chain.clear()

    def _settle(self, nodes: Sequence[Node]) -> None:
        """Wait for the products whose sums some nodes need; before a branch, or a loop that does not count, for all."""
        if any(node.regions and node.op is not control.for_ for node in nodes):
            self.flight.settle_all()
        elif not any(node.regions for node in nodes):
            self.flight.settle(v for node in nodes for v in node.args)

    def emit(self, node: Node) -> None:
        """Emit a node."""
        self.producers.update(dict.fromkeys(node.results, node))
        self._settle([node])
        with self.at(node):
            if self.hazards.before(node):
                self.team.meet(self.text)
            rule = visit.get(node.op)
            if rule is not None:
                rule(self, node)
            elif node.op.pointwise:
                pointwise.emit_chain(self, [node])
            else:
                raise UnsupportedOpError(f"the target ptx cannot emit {node.op.name}", location=node.loc)

    def one(self, v: Value) -> str:
        """The register or number of a scalar."""
        return self.values[v][0]

    def layout(self, v: Value) -> Layout:
        """The layout of a block."""
        return self.layouts[v]

    def end(self) -> str:
        """The label at the end of the entry, for threads that go there at once."""
        self.ended = self.ended or self.text.new_label("end")
        return self.ended

    def meet(self) -> None:
        """Wait for the team, between two uses of memory by the emission itself."""
        self.team.meet(self.text)
        self.hazards.met()


def _used(block: Block) -> set[Value]:
    """The values that something takes."""
    found = set(block.results)
    for node in block.walk():
        found.update(node.args, *(region.results for region in node.regions))
    return found
