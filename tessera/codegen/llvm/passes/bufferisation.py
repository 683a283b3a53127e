"""Bufferisation: which blocks are fused into the loops that use them, and which are stored in scratch memory.

Use-def chains in program order, with the loops around each use, say what a buffer would save, and when memory that a
load
reads is overwritten before its last use.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tessera.codegen.block_types import get_tensor_type, static_shape
from tessera.core.types import RefType, TensorType
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rules import Op
from tessera.ops.dialects import control_flow, inline_asm, tile
from tessera.ops.dialects.tile import grid_barrier
from tessera.ops.tensor import basic, contractions, elementwise, shape

# Where the values of a tile function are made and used, in program order, with the loops around.


LOOP_OPS = (control_flow.for_, control_flow.while_)


@dataclass(frozen=True, eq=False)
class UseSite:
    """A node in its place: its number in program order, and the last number of each loop around it."""

    node: Node
    number: int
    loops: tuple[Node, ...]


class UseDefChains:
    """The sites of a function: of every node, of every value's uses, and of writes to each memory."""

    def __init__(self, function: Function) -> None:
        self.sites: list[UseSite] = []
        self.made: dict[Value, UseSite] = {}
        self.used: dict[Value, list[UseSite]] = defaultdict(list)
        self.ends: dict[Node, int] = {}
        self.owners: dict[Value, tuple[Node, int]] = {}  # of a loop's carried parameters: the loop, the place
        self.writes: dict[Value, list[UseSite]] = defaultdict(list)
        self._refs = [p for p in function.params if isinstance(p.type, RefType)]
        self._block(function.body, ())

    def _block(self, block: Block, loops: tuple[Node, ...]) -> None:
        for node in block.nodes:
            site = UseSite(node, len(self.sites), loops)
            self.sites.append(site)
            for v in node.args:
                self.used[v].append(site)
            for v in node.results:
                self.made[v] = site
            if "write" in node.op.effects:
                self.writes[node.args[0]].append(site)
            if node.op is grid_barrier:  # other programs may have written any of them
                for ref in self._refs:
                    self.writes[ref].append(site)
            for region in node.regions:
                self._region(site, region)
            self.ends[node] = len(self.sites)

    def _region(self, site: UseSite, region: Block) -> None:
        inner = (*site.loops, site.node) if site.node.op in LOOP_OPS else site.loops
        for place, param in enumerate(region.params):
            self.made[param] = UseSite(site.node, site.number, inner)
            carried = place - (site.node.op is control_flow.for_)
            if carried >= 0:
                self.owners[param] = (site.node, carried)
        self._block(region, inner)
        # What a region hands back is used at its end.
        end = UseSite(site.node, len(self.sites), inner)
        self.sites.append(end)
        for v in region.results:
            self.used[v].append(end)

    def last(self, made: UseSite, use: UseSite) -> int:
        """The last moment at which this use reads: a loop that the value was not made in repeats it."""
        outer = [n for n in use.loops if n not in made.loops]
        return self.ends[outer[0]] if outer else use.number

    def backwards(self) -> Iterator[UseSite]:
        """The sites of nodes with results, last first."""
        return (s for s in reversed(self.sites) if self.is_made_at(s))

    def is_made_at(self, site: UseSite) -> bool:
        """Whether a site is that of a node with results (not the end of one of its regions)."""
        return bool(site.node.results) and self.made[site.node.results[0]] is site


# Which blocks are computed where they are used, and which are put into scratch memory first.


DATA_MOVEMENT_OPS = (basic.full, basic.broadcast_to, shape.reshape, shape.permute, shape.iota, tile.load, tile.gather)
# Costs in additions where they differ from the op's own column `cost`.
OP_COST: dict[Op, int] = {
    **dict.fromkeys((basic.full, basic.broadcast_to, shape.iota, shape.reshape, shape.permute), 0),
    tile.gather: 8,
    inline_asm.inline: 10,
}
REUSE_THRESHOLD, LOOP_THRESHOLD, BROADCAST_THRESHOLD = (
    4,
    3,
    8,
)  # from these costs on: used in several nests, in a loop, along an axis

# Where a value is needed at last, and whether on the way there each element stays in its place.
SinkSites = dict[UseSite, bool]


def is_block(v: Value) -> bool:
    """Whether a value is a block rather than a scalar or a ref."""
    return isinstance(v.type, TensorType) and v.type.rank > 0


def is_fusible(op: Op) -> bool:
    """Whether an op's elements can be computed one by one."""
    return op.pointwise or op in DATA_MOVEMENT_OPS or op is inline_asm.inline


class BufferisationPlan:
    """The decisions for one tile function.

    `held` are the lazy blocks to put into memory; `target` maps a block to the loop parameter whose
    memory it is computed into; `joined` maps a sum to its dot, which is then added in place.
    """

    def __init__(self, function: Function, apart: bool = True) -> None:
        self.uses = UseDefChains(function)
        # Parameters that may name the same memory are all written when one is.
        self._same = () if apart else tuple(p for p in function.params if isinstance(p.type, RefType))
        self.held: set[Value] = set()
        self.target: dict[Value, Value] = {}
        self.joined: dict[Value, Value] = {}
        self._sinks: dict[Value, SinkSites] = {}
        self._costs: dict[Value, int] = {}
        self._yields(function)
        for site in self.uses.backwards():
            for v in site.node.results:
                if is_block(v) and is_fusible(site.node.op) and self._worth(v, site):
                    self.held.add(v)
        for v, param in list(self.target.items()):
            if not self._in_place(v, param):
                del self.target[v]
        self.joined = {v: d for v, d in self.joined.items() if v in self.target}

    def is_deferred(self, v: Value) -> bool:
        """Whether a dot is left to the sum that takes it."""
        return v in self.joined.values()

    def _yields(self, function: Function) -> None:
        """What a loop carries on is put into memory, if possible the very memory it had before."""
        for node in function.body.walk():
            for param, v in _find_carried_pairs(node):
                made = self.uses.made.get(v)
                if not is_block(v) or made is None or v in self.uses.owners or node not in made.loops:
                    continue
                self.held.add(v)
                if v not in self.target and made.loops[-1] is node:
                    self.target[v] = param
                    self._join(v, made)

    def _join(self, v: Value, made: UseSite) -> None:
        if made.node.op is not elementwise.add:
            return
        for x in made.node.args:
            source = self.uses.made.get(x)
            if source is not None and source.node.op is contractions.dot and self._joinable(x, v):
                self.joined[v] = x
                return

    def _joinable(self, x: Value, v: Value) -> bool:
        a = get_tensor_type(self.uses.made[x].node.args[0])
        exact = a.accumulate == x.type.dtype == v.type.dtype and self.uses.made[x].loops == self.uses.made[v].loops
        return exact and len(self.uses.used[x]) == 1

    def _worth(self, v: Value, site: UseSite) -> bool:
        if v in self.held:
            return True
        sinks, cost = self.sinks(v), self.cost(v)
        if site.node.op in (tile.load, tile.gather) and self._overtaken(v, site, sinks):
            return True
        repeated = any(s.node.op is basic.broadcast_to and _grows(s.node) for s in self.uses.used[v])
        into = any(self.uses.last(site, s) != s.number for s in sinks)
        return (
            (len(sinks) > 1 and cost >= REUSE_THRESHOLD)
            or (into and cost >= LOOP_THRESHOLD)
            or (repeated and cost >= BROADCAST_THRESHOLD)
        )

    def sinks(self, v: Value) -> SinkSites:
        """Where the elements of a value are read by something that is not computed lazily itself."""
        if v not in self._sinks:
            found: SinkSites = {}
            for use in self.uses.used[v]:
                for sink, straight in self._through(v, use).items():
                    found[sink] = found.get(sink, True) and straight
            self._sinks[v] = found
        return self._sinks[v]

    def _through(self, v: Value, use: UseSite) -> SinkSites:
        node = use.node
        if not self.uses.is_made_at(use):
            return {use: _is_elementwise_use(v, node)}
        out = node.results[0]
        if is_fusible(node.op) and is_block(out):
            straight = node.op.pointwise
            if out in self.held:
                return {use: straight}
            return {s: ok and straight for s, ok in self.sinks(out).items()}
        # The operands of a joined dot are read where its sum is made.
        sums = [total for total, dot in self.joined.items() if dot is out]
        return {self.uses.made[sums[0]]: False} if sums else {use: _is_elementwise_use(v, node)}

    def _overtaken(self, v: Value, site: UseSite, sinks: SinkSites) -> bool:
        """Whether what a load reads may be written again before it is needed."""
        ref = site.node.args[0]
        writes = [w for r in (self._same if ref in self._same else (ref,)) for w in self.uses.writes[r]]
        for sink, straight in sinks.items():
            last = self.uses.last(site, sink)
            for write in writes:
                itself = write is sink and straight and _accesses_same_block(site.node, write.node)
                if site.number < write.number <= last and not itself:
                    return True
        return False

    def _in_place(self, v: Value, param: Value) -> bool:
        """Whether nothing reads the old value of a carried block once its new one is being written."""
        made = self.uses.made[v]
        return all(s.number < made.number or (s is made and straight) for s, straight in self.sinks(param).items())

    def cost(self, v: Value) -> int:
        """About how long an element takes if it is computed from memory."""
        if v not in self._costs:
            site = self.uses.made.get(v)
            lazy = site is not None and is_block(v) and is_fusible(site.node.op) and v in site.node.results
            self._costs[v] = self._lazy_cost(site.node) if lazy and site is not None else 1
        return self._costs[v]

    def _lazy_cost(self, node: Node) -> int:
        own = 1 if node.op is tile.load else OP_COST.get(node.op, node.op.cost)
        return min(1000, own + sum(self.cost(a) for a in node.args if is_block(a)))


def _find_carried_pairs(node: Node) -> list[tuple[Value, Value]]:
    """The pairs (parameter, what it becomes) of a loop."""
    if node.op is control_flow.for_:
        return list(zip(node.regions[0].params[1:], node.regions[0].results, strict=True))
    if node.op is control_flow.while_:
        return list(zip(node.regions[1].params, node.regions[1].results, strict=True))
    return []


def _grows(node: Node) -> bool:
    return math.prod(static_shape(node.out.type)) > math.prod(static_shape(node.args[0].type))


def _is_elementwise_use(v: Value, node: Node) -> bool:
    """Whether a node reads each element where it writes it: a store, or a loop that takes its start from it."""
    if node.op is tile.store:
        return v.type.shape == node.args[1].type.shape
    return node.op in LOOP_OPS


def _accesses_same_block(load: Node, store: Node) -> bool:
    if store.op is not tile.store or load.op is not tile.load or load.args[0] is not store.args[0]:
        return False
    rank = load.args[0].type.rank
    return load.args[1 : 1 + rank] == store.args[2 : 2 + rank] and load.out.type.shape == store.args[1].type.shape
