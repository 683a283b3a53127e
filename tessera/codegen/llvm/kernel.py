"""The state of emitting one tile function, and the walk over its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tessera.codegen.blocks import sizes
from tessera.codegen.llvm import policy
from tessera.codegen.llvm.dot import join
from tessera.codegen.llvm.element import value_at
from tessera.codegen.llvm.lane import Body
from tessera.codegen.llvm.library import Library
from tessera.codegen.llvm.nest import fill, lanes_for
from tessera.codegen.llvm.plan import Plan, is_block, is_lazy
from tessera.codegen.llvm.scratch import Memory, Scratch
from tessera.codegen.llvm.text import Text
from tessera.codegen.llvm.visit import visit
from tessera.codegen.ranges import Ranges
from tessera.errors import Location, TesseraError, UnsupportedOpError
from tessera.ir.core import Block, Function, Node, Value
from tessera.ops.chance import round_by_chance
from tessera.types import TensorType


class Kernel:
    """One tile function under emission.

    A value is in `scalars` (the name of a register), in `memories` (refs), in `buffers` (blocks held in
    scratch memory), or is computed from its producer wherever a loop asks for an element.
    """

    def __init__(
        self,
        function: Function,
        text: Text,
        library: Library,
        vector_bytes: int,
        grid: Sequence[int] | None = None,
        apart: bool = True,
    ) -> None:
        self.function, self.text, self.library, self.vector_bytes = function, text, library, vector_bytes
        self.scratch = Scratch(text)
        self.plan = Plan(function, apart)
        self.producers: dict[Value, Node] = {}
        self.ranges = Ranges(self.producers, grid)
        self.scalars: dict[Value, str] = {}
        self.memories: dict[Value, Memory] = {}
        self.buffers: dict[Value, Memory] = {}
        self._loc: Location = function.loc

    @contextmanager
    def at(self, node: Node) -> Iterator[None]:
        """Tie the lines emitted inside, and errors, to the node's place."""
        before, self._loc = self._loc, node.loc
        self.text.place(node.loc)
        try:
            yield
        except TesseraError as error:
            raise error.at(node.loc) from None
        finally:
            self._loc = before
            self.text.place(before)

    def run(self, block: Block) -> None:
        """Emit the nodes of a block in order."""
        for node in block.nodes:
            for v in node.results:
                self.producers[v] = node
            with self.at(node):
                self._node(node)

    def _node(self, node: Node) -> None:
        _check_policy(node)
        rule = visit.get(node.op)
        if node.results and node.results[0] in self.plan.joined:
            join(self, node, self.plan.joined[node.out])
        elif rule is not None:
            rule(self, node)
        elif not is_lazy(node.op):
            raise UnsupportedOpError(f"the target llvm cannot emit {node.op.name}", location=node.loc)
        elif not is_block(node.out):
            self.scalars[node.out] = value_at(Body(self), node.out, ()).name
        elif node.out in self.plan.held:
            self.hold(node.out)

    def hold(self, v: Value) -> None:
        """Compute a block into memory now."""
        target = self.room(v)
        fill(self, v, target)
        self.buffers[v] = target

    def room(self, v: Value) -> Memory:
        """Memory for a block: that of the loop parameter it becomes, where the plan says so, or new."""
        param = self.plan.target.get(v)
        if param is not None:
            return self.buffers[param]
        return self.spare(v)

    def spare(self, v: Value) -> Memory:
        """New memory for a block."""
        return self.scratch.block(v.type.dtype, sizes(v.type), lanes_for(self, v.type.dtype))

    def move(self, v: Value, target: Memory) -> None:
        """Bring a block to a memory, unless it is there."""
        if self.buffers.get(v) is not target:
            fill(self, v, target)


def _check_policy(node: Node) -> None:
    if node.op is round_by_chance:
        return  # its own row rounds from f64, once
    operands = tuple(t.dtype for t in node.types)
    for v in node.results:
        if isinstance(v.type, TensorType) and (found := policy.lacking(v.type, operands)):
            raise policy.refuse(found, node.loc)
