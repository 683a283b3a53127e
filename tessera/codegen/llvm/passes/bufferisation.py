"""Bufferisation: which blocks are fused into the loops that use them, and which are stored in scratch memory.

Use-def chains in program order, with the loops around each use, give what a buffer would save, and whether memory that
a load reads is overwritten before the last use of its result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tessera.codegen.contract import get_tensor_type, static_shape
from tessera.codegen.llvm.text.builder import NARROW_FLOATS, get_element_bytes
from tessera.core.types import RefType, TensorType
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rules import Op
from tessera.ops.dialects import control_flow, inline_asm, tile
from tessera.ops.dialects.tile import grid_barrier
from tessera.ops.tensor import basic, contractions, elementwise, shape

# Use-def chains: definitions and uses in program order, with the loops around them.


LOOP_OPS = (control_flow.for_, control_flow.while_)


@dataclass(frozen=True, eq=False)
class UseSite:
    """A node, its number in program order, and the loops around it."""

    node: Node
    number: int
    loops: tuple[Node, ...]


class UseDefChains:
    """The definition and the uses of every value, and the writes to every memory."""

    def __init__(self, function: Function) -> None:
        self.sites: list[UseSite] = []
        self.definitions: dict[Value, UseSite] = {}
        self.uses_of: dict[Value, list[UseSite]] = defaultdict(list)
        self.ends: dict[Node, int] = {}
        self.owners: dict[Value, tuple[Node, int]] = {}  # of a loop-carried parameter: the loop, its number
        self.writes: dict[Value, list[UseSite]] = defaultdict(list)
        self._refs = [p for p in function.params if isinstance(p.type, RefType)]
        self._visit_block(function.body, ())

    def _visit_block(self, block: Block, loops: tuple[Node, ...]) -> None:
        for node in block.nodes:
            site = UseSite(node, len(self.sites), loops)
            self.sites.append(site)
            for v in node.args:
                self.uses_of[v].append(site)
            for v in node.results:
                self.definitions[v] = site
            if "write" in node.op.effects:
                self.writes[node.args[0]].append(site)
            if node.op is grid_barrier:  # other programs may write any of them before it
                for ref in self._refs:
                    self.writes[ref].append(site)
            for region in node.regions:
                self._visit_region(site, region)
            self.ends[node] = len(self.sites)

    def _visit_region(self, site: UseSite, region: Block) -> None:
        inner = (*site.loops, site.node) if site.node.op in LOOP_OPS else site.loops
        for place, param in enumerate(region.params):
            self.definitions[param] = UseSite(site.node, site.number, inner)
            carried = place - (site.node.op is control_flow.for_)
            if carried >= 0:
                self.owners[param] = (site.node, carried)
        self._visit_block(region, inner)
        # A region's results are used at its end.
        end = UseSite(site.node, len(self.sites), inner)
        self.sites.append(end)
        for v in region.results:
            self.uses_of[v].append(end)

    def find_last_use(self, made: UseSite, use: UseSite) -> int:
        """The number of the last read by a use: a loop around the use, but not around the definition, repeats it."""
        outer = [n for n in use.loops if n not in made.loops]
        return self.ends[outer[0]] if outer else use.number

    def backwards(self) -> Iterator[UseSite]:
        """The definitions of results, last first."""
        return (s for s in reversed(self.sites) if self.is_made_at(s))

    def is_made_at(self, site: UseSite) -> bool:
        """Whether a site is the definition of its node's results, not the end of one of its regions."""
        return bool(site.node.results) and self.definitions[site.node.results[0]] is site


# The decisions: which blocks are fused into their uses, and which are stored in scratch memory.


DATA_MOVEMENT_OPS = (
    basic.full,
    basic.dim_value,
    basic.broadcast_to,
    shape.reshape,
    shape.permute,
    shape.iota,
    tile.load,
    tile.gather,
)
# Costs in additions where they differ from the op's own column `cost`.
OP_COST: dict[Op, int] = {
    **dict.fromkeys((basic.full, basic.dim_value, basic.broadcast_to, shape.iota, shape.reshape, shape.permute), 0),
    tile.gather: 8,
    inline_asm.inline: 10,
}
# A block of at least this cost is stored if several loop nests use it, if a loop repeats its use, or a broadcast does.
REUSE_THRESHOLD, LOOP_THRESHOLD, BROADCAST_THRESHOLD = 4, 3, 8
MAX_FUSED_DEPTH = 128  # ops after each other that are fused: emission computes an element from its operands recursively

# The uses of a value that are not fused themselves, and whether the path to each is elementwise.
SinkSites = dict[UseSite, bool]


def is_block(v: Value) -> bool:
    """Whether a value is a block, not a scalar or a ref."""
    return isinstance(v.type, TensorType) and v.type.rank > 0


def is_fusible(op: Op) -> bool:
    """Whether an op's elements can be computed independently."""
    return op.pointwise or op in DATA_MOVEMENT_OPS or op is inline_asm.inline


class BufferisationPlan:
    """The decisions for one tile function.

    `stored` are the fusible blocks to be stored in memory; `target` maps a block to the loop-carried parameter in whose
    memory it is computed; `fused_dots` maps a sum to the dot that accumulates into it; `store_groups` maps each store
    that shares its loop nest to all of them, so that a value that several store is computed once.

    `aliases` are the pairs of parameters (a written one first) that share memory, with whether they are the same
    memory; None: any two may share it.
    """

    def __init__(self, function: Function, aliases: Mapping[tuple[int, int], bool] | None) -> None:
        self.uses = UseDefChains(function)
        self._aliases = _list_aliases(function, aliases)
        self.store_groups = dict(self._group_stores(function.body))
        self._store_numbers = {s.node: s.number for s in self.uses.sites if s.node in self.store_groups}
        self.stored: set[Value] = set()
        self.target: dict[Value, Value] = {}
        self.fused_dots: dict[Value, Value] = {}
        self._sinks: dict[Value, SinkSites] = {}
        self._costs: dict[Value, int] = {}
        self._depths: dict[Value, int] = {}
        self._measure_chains()
        self._plan_carried_blocks(function)
        required = set(self.stored)
        for site in self.uses.backwards():
            for v in site.node.results:
                if is_block(v) and is_fusible(site.node.op) and self._should_store(v, site):
                    self.stored.add(v)
        self._drop_cheap(required)
        for v, param in list(self.target.items()):
            if not self._can_compute_in_place(v, param):
                del self.target[v]
        self.fused_dots = {v: d for v, d in self.fused_dots.items() if v in self.target}

    def _drop_cheap(self, required: set[Value]) -> None:
        """Compute again, in each loop that uses it, what costs little to compute from blocks that are stored anyway."""
        for v in [v for v in self.uses.definitions if v in self.stored and v not in required]:
            node = self.uses.definitions[v].node
            if node.op.pointwise and all(a in self.stored for a in node.args if is_block(a)):
                self._costs.pop(v)
                if not self._is_worth_storing(v, self.uses.definitions[v]):
                    self.stored.remove(v)

    def is_deferred(self, v: Value) -> bool:
        """Whether a dot is emitted with the sum that uses it."""
        return v in self.fused_dots.values()

    def _measure_chains(self) -> None:
        """Find the cost and the depth of each fusible block, in order, and store those that are too deep."""
        for site in self.uses.sites:
            if not self.uses.is_made_at(site) or not is_fusible(site.node.op):
                continue
            for v in site.node.results:
                self.cost(v)
                self._depths[v] = 1 + max((self._depths.get(a, 0) for a in site.node.args), default=0)
                if is_block(v) and self._depths[v] > MAX_FUSED_DEPTH:
                    self.stored.add(v)
                    self._depths[v] = 0

    def _plan_carried_blocks(self, function: Function) -> None:
        """Store loop-carried blocks in memory, in place of the old value where that is possible."""
        for node in function.body.walk():
            for param, v in _find_carried_pairs(node):
                made = self.uses.definitions.get(v)
                if not is_block(v) or made is None or v in self.uses.owners or node not in made.loops:
                    continue
                self.stored.add(v)
                if v not in self.target and made.loops[-1] is node:
                    self.target[v] = param
                    self._fuse_dot(v, made)

    def _fuse_dot(self, v: Value, made: UseSite) -> None:
        if made.node.op is not elementwise.add:
            return
        for x in made.node.args:
            source = self.uses.definitions.get(x)
            if source is not None and source.node.op is contractions.dot and self._can_fuse_dot(x, v):
                self.fused_dots[v] = x
                return

    def _can_fuse_dot(self, x: Value, v: Value) -> bool:
        a = get_tensor_type(self.uses.definitions[x].node.args[0])
        exact = (
            a.accumulate == x.type.dtype == v.type.dtype
            and a.accumulate not in NARROW_FLOATS
            and self.uses.definitions[x].loops == self.uses.definitions[v].loops
        )
        return exact and len(self.uses.uses_of[x]) == 1

    def _should_store(self, v: Value, site: UseSite) -> bool:
        if v in self.stored:
            return True
        if site.node.op is basic.broadcast_to and _is_expanding(site.node):
            return False  # its operand is stored instead, and has fewer elements
        if site.node.op in (tile.load, tile.gather) and self._is_overwritten(v, site, self.sinks(v)):
            return True
        return self._is_worth_storing(v, site)

    def _is_worth_storing(self, v: Value, site: UseSite) -> bool:
        sinks, cost = self.sinks(v), self.cost(v)
        broadcast = any(s.node.op is basic.broadcast_to and _is_expanding(s.node) for s in self.uses.uses_of[v])
        in_loop = any(self.uses.find_last_use(site, s) != s.number for s in sinks)
        return (
            (len({self.store_groups.get(s.node, (s.node,))[0] for s in sinks}) > 1 and cost >= REUSE_THRESHOLD)
            or (in_loop and cost >= LOOP_THRESHOLD)
            or (broadcast and cost >= BROADCAST_THRESHOLD)
        )

    def sinks(self, v: Value) -> SinkSites:
        """The uses of a value's elements by nodes that are not fused."""
        if v not in self._sinks:
            result: SinkSites = {}
            for use in self.uses.uses_of[v]:
                for sink, straight in self._find_use_sinks(v, use).items():
                    result[sink] = result.get(sink, True) and straight
            self._sinks[v] = result
        return self._sinks[v]

    def _find_use_sinks(self, v: Value, use: UseSite) -> SinkSites:
        node = use.node
        if not self.uses.is_made_at(use):
            return {use: _is_elementwise_use(v, node)}
        out = node.results[0]
        if is_fusible(node.op) and is_block(out):
            straight = node.op.pointwise or node.op is shape.reshape  # which keeps the order of elements
            if out in self.stored:
                return {use: straight}
            return {s: ok and straight for s, ok in self.sinks(out).items()}
        # The operands of a dot fused into a sum are read where the sum is computed.
        accumulations = [total for total, dot in self.fused_dots.items() if dot is out]
        return (
            {self.uses.definitions[accumulations[0]]: False} if accumulations else {use: _is_elementwise_use(v, node)}
        )

    def _is_overwritten(self, v: Value, site: UseSite, sinks: SinkSites) -> bool:
        """Whether the memory that a load reads may be written before the last use of its result."""
        ref = site.node.args[0]
        writes = [(w, same) for r, same in ((ref, True), *self._aliases.get(ref, {}).items())
                  for w in self.uses.writes[r]]  # fmt: skip
        for sink, straight in sinks.items():
            # The loop nest of a group of stores reads and writes as long as the last of them.
            group = self.store_groups.get(sink.node, (sink.node,))
            last = max(self.uses.find_last_use(site, sink), self._store_numbers.get(group[-1], 0))
            for write, same in writes:
                in_place = same and write.node in group and straight and _accesses_same_block(site.node, write.node)
                if site.number < write.number <= last and not in_place:
                    return True
        return False

    def _group_stores(self, block: Block) -> Iterator[tuple[Node, tuple[Node, ...]]]:
        """For each store of several that follow each other, and store blocks of one shape to different memories: all.

        Nodes without effects may lie between them.
        """
        listed = [n for n in block.nodes if n.op.effects or n.regions]
        for key, run in groupby(listed, _make_loop_key):
            group = tuple(run)
            if key is not None and len(group) > 1 and self._are_disjoint([n.args[0] for n in group]):
                yield from ((n, group) for n in group)
        for node in listed:
            for region in node.regions:
                yield from self._group_stores(region)

    def _are_disjoint(self, refs: Sequence[Value]) -> bool:
        return len(set(refs)) == len(refs) and not any(self._aliases.get(r, {}).keys() & refs for r in refs)

    def _can_compute_in_place(self, v: Value, param: Value) -> bool:
        """Whether nothing reads the old value of a loop-carried block after its new value is first written."""
        made = self.uses.definitions[v]
        return all(s.number < made.number or (s is made and straight) for s, straight in self.sinks(param).items())

    def cost(self, v: Value) -> int:
        """The cost of an element when it is computed from memory."""
        if v not in self._costs:
            site = self.uses.definitions.get(v)
            lazy = site is not None and is_block(v) and is_fusible(site.node.op) and v in site.node.results
            self._costs[v] = self._compute_fused_cost(site.node) if lazy and site is not None else 1
        return self._costs[v]

    def _compute_fused_cost(self, node: Node) -> int:
        own = 1 if node.op is tile.load else OP_COST.get(node.op, node.op.cost)
        return min(1000, own + sum(1 if a in self.stored else self.cost(a) for a in node.args if is_block(a)))


def _list_aliases(function: Function, aliases: Mapping[tuple[int, int], bool] | None) -> dict[Value, dict[Value, bool]]:
    """For each ref the others that share memory with it, and whether they are the same memory."""
    refs = [p for p in function.params if isinstance(p.type, RefType)]
    if aliases is None:
        return {r: {other: False for other in refs if other is not r} for r in refs}
    found: dict[Value, dict[Value, bool]] = defaultdict(dict)
    for (i, j), same in aliases.items():
        for a, b in ((i, j), (j, i)):
            held = found[function.params[a]]
            held[function.params[b]] = held.get(function.params[b], True) and same
    return found


def _make_loop_key(node: Node) -> tuple[object, ...] | None:
    """What two stores must have in common to share a loop nest: the shape, and the number of elements in a register."""
    if node.op is not tile.store or not is_block(node.args[1]):
        return None
    type = get_tensor_type(node.args[1])
    return tuple(type.shape), max(4, get_element_bytes(type.dtype))


def _find_carried_pairs(node: Node) -> list[tuple[Value, Value]]:
    """The pairs (parameter, next value) of a loop."""
    if node.op is control_flow.for_:
        return list(zip(node.regions[0].params[1:], node.regions[0].results, strict=True))
    if node.op is control_flow.while_:
        return list(zip(node.regions[1].params, node.regions[1].results, strict=True))
    return []


def _is_expanding(node: Node) -> bool:
    return math.prod(static_shape(node.out.type)) > math.prod(static_shape(node.args[0].type))


def _is_elementwise_use(v: Value, node: Node) -> bool:
    """Whether a node reads each element at the index where it writes it: a store, or a loop's initial value."""
    if node.op is tile.store:
        return v.type.shape == node.args[1].type.shape
    return node.op in LOOP_OPS


def _accesses_same_block(load: Node, store: Node) -> bool:
    """Whether a load and a store of one memory have the same indices and shape."""
    if store.op is not tile.store or load.op is not tile.load:
        return False
    rank = load.args[0].type.rank
    return load.args[1 : 1 + rank] == store.args[2 : 2 + rank] and load.out.type.shape == store.args[1].type.shape
