"""Loop unrolling: loops that only load and compute take several rounds at once, whose loads are under way together.

The rounds that are left over come before the loop. What a round does not need of the one before it comes first, so that
a thread waits for memory once for all of them. The order of the rounds, and so each result, stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.shared_memory import is_movable_load
from tessera.codegen.ptx.text.builder import element_bytes
from tessera.core.types import TensorType, int64
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.lower.passes.canonicalisation import COMBINERS
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, elementwise, shape

BYTES_UNDER_WAY = 128  # that a thread loads at once; with half of a processor's threads they keep its memory busy
MOST_LOADED = 64  # elements that a thread holds at once
MOST_ROUNDS = 4
MOVED_OPS = (tile.load, basic.full, basic.broadcast_to, shape.iota, shape.permute, shape.reshape)


def unroll_loops(function: Function, threads: int) -> Function:
    """The function whose loops of loads take several rounds at once, for teams of so many threads."""
    if function.attrs.get("group", 1) > 1:  # a thread holds whole blocks
        return function
    written = tile.find_written_refs(function.body)
    uses = UseDef(function)
    order: list[Node] = []
    for node in function.body.nodes:
        found = UnrollableLoop.match(node, uses, written) if node.op is control_flow.for_ else None
        factor = 1 if found is None else found.choose_factor(threads)
        order += found.unroll(factor) if found is not None and factor > 1 else [node]
    return replace(function, body=replace(function.body, nodes=tuple(order)))


def folds_rows(node: Node) -> bool:
    """Whether a node adds up the rows of a block that partial sums fold: each thread what it holds itself."""
    return node.op in COMBINERS and node.attrs["axis"] == (0,) and len(static_shape(node.out)) == 1


@dataclass(frozen=True)
class UnrollableLoop:
    """A loop with known bounds whose rounds only load from global memory and compute."""

    loop: Node
    start: int
    step: int
    rounds: int
    loads: tuple[Node, ...]

    @classmethod
    def match(cls, loop: Node, uses: UseDef, written: set[Value]) -> UnrollableLoop | None:
        """The loop, or None where rounds do something else or their number is not known."""
        bounds = [uses.find(v, basic.full) for v in loop.args[:3]]
        if any(b is None or not isinstance(b.attrs["value"], int) for b in bounds):
            return None
        start, stop, step = (b.attrs["value"] for b in bounds if b is not None)
        (body,) = loop.regions
        loads = tuple(n for n in body.nodes if n.op is tile.load)
        plain = all(n.op.pointwise or n.op in MOVED_OPS or folds_rows(n) for n in body.nodes)
        if not (plain and loads and step > 0 and all(is_movable_load(n, written) for n in loads)):
            return None
        return cls(loop, start, step, -(-(stop - start) // step), loads)

    def choose_factor(self, threads: int) -> int:
        """The rounds at once, for as many bytes under way as memory takes; 1 where one round has them."""
        sizes = [(math.prod(static_shape(n.out)) / threads, n.args[0].type) for n in self.loads]
        held = max(sum(n for n, _ in sizes), 1)
        moved = sum(n * element_bytes(type.dtype) for n, type in sizes)  # type: ignore[union-attr]
        return max(1, min(int(BYTES_UNDER_WAY // moved), int(MOST_LOADED // held), MOST_ROUNDS, self.rounds))

    def unroll(self, factor: int) -> list[Node]:
        """The rounds that are left over, and the loop with `factor` rounds in one."""
        rest = self.rounds % factor
        first, last = self.start, self.start + self.rounds * self.step
        before, state = self._copy_rounds(None, [first + r * self.step for r in range(rest)], self.loop.args[3:])
        bounds = [_make_number(n) for n in (first + rest * self.step, last, factor * self.step)]
        params = [Value(v.type) for v in self.loop.regions[0].params]
        nodes, results = self._copy_rounds(params[0], [r * self.step for r in range(factor)], params[1:])
        region = Block(tuple(params), tuple(nodes), tuple(results))
        args = (*(n.out for n in bounds), *state)
        return [*before, *bounds, replace(self.loop, args=args, regions=(region,))]

    def _copy_rounds(
        self, index: Value | None, offsets: Sequence[int], state: Sequence[Value]
    ) -> tuple[list[Node], list[Value]]:
        """The nodes of rounds at an index plus offsets, and what the last one carries: first what all of them load."""
        (body,) = self.loop.regions
        early, late, carried = list[Node](), list[Node](), list(state)
        dependent = _find_dependent(body)
        for offset in offsets:
            number = _make_number(offset)
            early.append(number)
            at = number.out
            if index is not None:  # else the offset is the index
                at = Value(number.out.type)
                early.append(Node(elementwise.add, (index, number.out), Attrs({}), (at,)))
            known: dict[Value, Value] = dict(zip(body.params, (at, *carried), strict=True))
            for node in body.nodes:
                (late if node in dependent else early).append(_copy_node(node, known))
            carried = [known.get(v, v) for v in body.results]
        return [*early, *late], carried


def _make_number(number: int) -> Node:
    attrs = Attrs({"shape": (), "value": number, "dtype": int64})
    return Node(basic.full, (), attrs, (Value(TensorType((), int64)),))


def _copy_node(node: Node, known: dict[Value, Value]) -> Node:
    """A copy that takes and gives other values, which become known."""
    results = tuple(Value(v.type) for v in node.results)
    copy = replace(node, args=tuple(known.get(v, v) for v in node.args), results=results)
    known.update(zip(node.results, results, strict=True))
    return copy


def _find_dependent(body: Block) -> set[Node]:
    """The nodes of a round that need what the round before it carries."""
    values, found = set(body.params[1:]), set[Node]()
    for node in body.nodes:
        if not values.isdisjoint(node.args):
            found.add(node)
            values.update(node.results)
    return found
