"""Divergence analysis (static) and tail duplication: which values of a tile function differ between the tiles of a
group, and what follows a divergent branch with waits as a part of both its sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tessera.core.errors import Location
from tessera.core.types import REGISTER, RefType, TensorType, Type, bool_, scalar
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ops.dialects import control_flow, mbarrier, tile
from tessera.ops.dialects.mbarrier import mbarrier_wait
from tessera.ops.tensor import basic, elementwise, shape

# Divergence analysis (Coutinho et al. 2011).


_LOCKSTEP_OPS = (tile.collect, tile.exchange, tile.meet)
# Ops whose results differ between tiles for any operands.
_DIVERGENT_OPS = (tile.local_id, tile.atomic, tile.compare_exchange)


@lru_cache(maxsize=1024)
def find_lockstep_width(*blocks: Block) -> int:
    """How many neighbouring tiles run in lockstep through blocks in which they exchange values or synchronise."""
    widths = {int(n.attrs["width"]) for b in blocks for n in b.walk() if n.op in _LOCKSTEP_OPS}
    return math.lcm(*widths)


class DivergenceAnalysis:
    """The values that differ between tiles; `uneven`: a wait on an mbarrier has a divergent operand."""

    def __init__(self, values: set[Value]) -> None:
        self.values = values
        self.uneven = False

    def walk(self, block: Block) -> None:
        """Propagate divergence through a block."""
        for node in block.nodes:
            if node.op is mbarrier_wait and not self.values.isdisjoint(node.args[1:]):
                self.uneven = True
            if node.regions:
                self._regions(node)
            elif node.op in _DIVERGENT_OPS or not self.values.isdisjoint(node.args) or _reads_private_memory(node):
                self.values.update(node.results)

    def _regions(self, node: Node) -> None:
        carried = {control_flow.for_: (3, 1), control_flow.while_: (0, 0)}.get(node.op)
        if carried is None:
            for region in node.regions:
                self.walk(region)
            inner = {v for region in node.regions for v in (*region.results, *region.free)}
            if not self.values.isdisjoint({*node.args, *inner}):
                self.values.update(node.results)
            return
        skip, first = carried
        body, bounds = node.regions[-1], node.args[:skip]
        if not self.values.isdisjoint(bounds):  # tiles leave it at different times
            self.values.update((*body.params, *node.results))
        before = -1
        while before != len(self.values):
            before = len(self.values)
            self._round(node, body, node.args[skip:], first)

    def _round(self, node: Node, body: Block, inits: Any, first: int) -> None:
        """Propagate divergence through one iteration: from the initial values and the results of the last one."""
        for init, left, result, param in zip(inits, body.results, node.results, body.params[first:], strict=True):
            if not self.values.isdisjoint((init, left)):
                self.values.update((param, result))
        for region in node.regions:
            for own, param in zip(region.params[first if region is body else 0 :], body.params[first:], strict=True):
                if param in self.values:
                    self.values.add(own)
            self.walk(region)
        if node.op is control_flow.while_ and not self.values.isdisjoint(node.regions[0].results):
            self.values.update((*body.params, *node.results))


def _reads_private_memory(node: Node) -> bool:
    """Whether a node reads memory that is private to a tile."""
    refs = [v.type for v in node.args if isinstance(v.type, RefType)]
    return any(ref.space == REGISTER for ref in refs)


# Tail duplication: up to the last arrival at an mbarrier.
#
# Tiles of one side then go on and arrive while those of the other still wait. Each tile does the same as before, in the
# same order; only the reconvergence at the branch's end is removed. Nothing moves past an op that all tiles of a group
# execute together. Where several such branches follow each other, each tile runs the whole stretch by itself:
# duplication would be exponential.


_WAIT_OPS = frozenset((mbarrier.mbarrier_wait,))
_ARRIVE_OPS = frozenset((mbarrier.mbarrier_arrive, mbarrier.mbarrier_copies))
# Ops that all tiles of a group execute together: allocation of shared memory, and synchronisation.
_GROUP_OPS = frozenset((tile.alloc, tile.barrier, tile.grid_barrier, tile.meet, tile.collect, tile.exchange))


def duplicate_tails(function: Function) -> Function:
    """Duplicate the tail of each divergent branch with waits, up to the last arrival, into both its sides.

    A function without such branches, or whose conditions are uniform, is returned as it is.
    """
    moved = function.body if int(function.attrs.get("group", 1)) == 1 else _duplicate_body_tails(function.body)
    return function if moved is function.body else replace(function, body=moved)


@lru_cache(maxsize=1024)
def _duplicate_body_tails(body: Block) -> Block:
    if not _contains_op(body.nodes, _WAIT_OPS):
        return body
    differing = DivergenceAnalysis(set())
    differing.walk(body)
    return _TailDuplication(differing.values).block(body, {})


def _contains_op(nodes: Sequence[Node], ops: frozenset) -> bool:
    return any(n.op in ops or any(_contains_op(r.nodes, ops) for r in n.regions) for n in nodes)


@dataclass(frozen=True)
class _TailDuplication:
    """The rewriting of one function; `differing` are its divergent values.

    Both sides hold the very same nodes, so that debug mode sees one operation in what two tiles do there (rule M6).
    """

    differing: set[Value]

    def block(self, block: Block, names: dict[Value, Value]) -> Block:
        """Rewrite a block, with free values renamed by `names`."""
        names, left, made = dict(names), list(block.nodes), []
        while left:
            node = _rename_node(left.pop(0), names)
            following = self._following(node, left)
            if not following:
                made.append(self._inside(node))
                continue
            moved, left = [_rename_node(n, names) for n in left[:following]], left[following:]
            later = [*left, *_make_result_use(block)]
            if any(self._parts(n) for n in moved):
                made += _make_divergent_region([node, *moved], later, names)
            else:
                made.append(self._inside(_duplicate_into_sides(node, moved, later, names)))
            self.differing.update(new for old, new in names.items() if old in self.differing)
        same = len(made) == len(block.nodes) and all(a is b for a, b in zip(made, block.nodes, strict=True))
        results = tuple(names.get(v, v) for v in block.results)
        return block if same and results == block.results else Block(block.params, tuple(made), results)

    def _inside(self, node: Node) -> Node:
        regions = tuple(self.block(r, {}) for r in node.regions)
        return (
            node if all(a is b for a, b in zip(regions, node.regions, strict=True)) else replace(node, regions=regions)
        )

    def _parts(self, node: Node) -> bool:
        """Whether a node is, or holds, a branch with waits whose condition differs between tiles."""
        own = node.op is control_flow.if_ and node.args[0] in self.differing and _contains_op([node], _WAIT_OPS)
        return own or any(self._parts(n) for r in node.regions for n in r.nodes)

    def _following(self, node: Node, rest: Sequence[Node]) -> int:
        """How many nodes after a branch move into its sides."""
        if node.op is not control_flow.if_ or node.args[0] not in self.differing or not _contains_op([node], _WAIT_OPS):
            return 0
        together = next((n for n, each in enumerate(rest) if _contains_op([each], _GROUP_OPS)), len(rest))
        return max((n + 1 for n in range(together) if _contains_op([rest[n]], _ARRIVE_OPS)), default=0)


def _make_result_use(block: Block) -> list[Node]:
    """A node that uses the results of a block."""
    return [Node(control_flow.if_, block.results, Attrs(), ())]


def _duplicate_into_sides(
    branch: Node, moved: Sequence[Node], later: Sequence[Node], names: dict[Value, Value]
) -> Node:
    """Move nodes into the sides of a branch; values used later are renamed to its results."""
    kept, found = _rename_live_out([branch, *moved], later, names)
    regions = tuple(
        Block(side.params, (*side.nodes, *_alias_results(side.results, branch), *moved), kept)
        for side in branch.regions
    )
    return replace(branch, results=found, regions=regions)


def _make_divergent_region(nodes: Sequence[Node], later: Sequence[Node], names: dict[Value, Value]) -> list[Node]:
    """Make a branch that all tiles take, in which each executes the nodes by itself; and its operands."""
    place = nodes[0].loc
    kept, found = _rename_live_out(nodes, later, names)
    me = Node(tile.local_id, (), Attrs(), (Value(tile.INDEX_TYPE),), (), place)
    first = _make_zero(tile.INDEX_TYPE, place)
    all_of_them = Node(elementwise.greater_equal, (me.out, first.out), Attrs(), (Value(scalar(bool_)),), (), place)
    idle = [_make_zero(v.type, place) for v in kept]  # no tile takes this side
    sides = Block((), tuple(nodes), kept), Block((), tuple(idle), tuple(n.out for n in idle))
    branch = Node(control_flow.if_, (all_of_them.out,), Attrs({"apart": True}), found, sides, place)
    return [me, first, all_of_them, branch]


def _make_zero(type: Type, place: Location) -> Node:
    assert isinstance(type, TensorType)
    attrs = Attrs({"shape": tuple(type.shape), "value": 0, "dtype": type.dtype})
    return Node(basic.full, (), attrs, (Value(type),), (), place)


def _rename_live_out(
    nodes: Sequence[Node], later: Sequence[Node], names: dict[Value, Value]
) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """The results of nodes that are used later, and their new names there."""
    used = {v for n in later for v in (*n.args, *(f for r in n.regions for f in r.free))}
    kept = tuple(v for n in nodes for v in n.results if v in used)
    found = tuple(Value(v.type, v.hint) for v in kept)
    names.update(zip(kept, found, strict=True))
    return kept, found


def _alias_results(values: Sequence[Value], branch: Node) -> list[Node]:
    """Copy a side's results to the names of the branch's results."""
    return [
        Node(shape.reshape, (v,), Attrs({"shape": tuple(v.type.shape)}), (name,), (), branch.loc)
        for v, name in zip(values, branch.results, strict=True)
    ]


def _rename_node(node: Node, names: dict[Value, Value]) -> Node:
    """Rename the operands of a node, those of nodes inside too."""
    outside = set(node.args).union(*(r.free for r in node.regions))
    if not names or outside.isdisjoint(names):
        return node
    args = tuple(names.get(v, v) for v in node.args)
    return replace(node, args=args, regions=tuple(_rename_block(r, names) for r in node.regions))


def _rename_block(block: Block, names: dict[Value, Value]) -> Block:
    nodes = tuple(_rename_node(n, names) for n in block.nodes)
    return Block(block.params, nodes, tuple(names.get(v, v) for v in block.results))
