"""Which blocks are computed where they are used, and which are put into scratch memory first."""

from __future__ import annotations

import math

from tessera.codegen.blocks import block_type, sizes
from tessera.codegen.llvm.uses import LOOPS, Site, Uses
from tessera.ir.core import Function, Node, Value
from tessera.op import Op
from tessera.ops import basic, control, elementwise, inline, linalg, shape, tile
from tessera.types import RefType, TensorType

MOVES = (basic.full, basic.broadcast_to, shape.reshape, shape.permute, shape.iota, tile.load, tile.gather)
# About how many times as long as an addition; what is not listed takes 1.
COST: dict[Op, int] = {
    **dict.fromkeys((basic.full, basic.broadcast_to, shape.iota, shape.reshape, shape.permute), 0),
    **dict.fromkeys((elementwise.div, elementwise.sqrt, elementwise.rsqrt), 4),
    **dict.fromkeys((elementwise.exp, elementwise.exp2, elementwise.log, elementwise.log2), 10),
    **dict.fromkeys((elementwise.tanh, elementwise.erf, elementwise.sin, elementwise.cos), 15),
    **dict.fromkeys((elementwise.pow, elementwise.floor_divide, elementwise.remainder), 30),
    tile.gather: 8,
    inline.inline: 10,
}
REUSED, INTO_LOOP, REPEATED = 4, 3, 8  # from these costs on: used in several nests, in a loop, along an axis

# Where a value is needed at last, and whether on the way there each element stays in its place.
Sinks = dict[Site, bool]


def is_block(v: Value) -> bool:
    """Whether a value is a block rather than a scalar or a ref."""
    return isinstance(v.type, TensorType) and v.type.rank > 0


def is_lazy(op: Op) -> bool:
    """Whether an op's elements can be computed one by one."""
    return op.pointwise or op in MOVES or op is inline.inline


class Plan:
    """The decisions for one tile function.

    `held` are the lazy blocks to put into memory; `target` maps a block to the loop parameter whose
    memory it is computed into; `joined` maps a sum to its dot, which is then added in place.
    """

    def __init__(self, function: Function, apart: bool = True) -> None:
        self.uses = Uses(function)
        # Parameters that may name the same memory are all written when one is.
        self._same = () if apart else tuple(p for p in function.params if isinstance(p.type, RefType))
        self.held: set[Value] = set()
        self.target: dict[Value, Value] = {}
        self.joined: dict[Value, Value] = {}
        self._sinks: dict[Value, Sinks] = {}
        self._costs: dict[Value, int] = {}
        self._yields(function)
        for site in self.uses.backwards():
            for v in site.node.results:
                if is_block(v) and is_lazy(site.node.op) and self._worth(v, site):
                    self.held.add(v)
        for v, param in list(self.target.items()):
            if not self._in_place(v, param):
                del self.target[v]
        self.joined = {v: d for v, d in self.joined.items() if v in self.target}

    def deferred(self, v: Value) -> bool:
        """Whether a dot is left to the sum that takes it."""
        return v in self.joined.values()

    def _yields(self, function: Function) -> None:
        """What a loop carries on is put into memory, if possible the very memory it had before."""
        for node in function.body.walk():
            for param, v in _carried(node):
                made = self.uses.made.get(v)
                if not is_block(v) or made is None or v in self.uses.owners or node not in made.loops:
                    continue
                self.held.add(v)
                if v not in self.target and made.loops[-1] is node:
                    self.target[v] = param
                    self._join(v, made)

    def _join(self, v: Value, made: Site) -> None:
        if made.node.op is not elementwise.add:
            return
        for x in made.node.args:
            source = self.uses.made.get(x)
            if source is not None and source.node.op is linalg.dot and self._joinable(x, v):
                self.joined[v] = x
                return

    def _joinable(self, x: Value, v: Value) -> bool:
        a = block_type(self.uses.made[x].node.args[0])
        exact = a.accumulate == x.type.dtype == v.type.dtype and self.uses.made[x].loops == self.uses.made[v].loops
        return exact and len(self.uses.used[x]) == 1

    def _worth(self, v: Value, site: Site) -> bool:
        if v in self.held:
            return True
        sinks, cost = self.sinks(v), self.cost(v)
        if site.node.op in (tile.load, tile.gather) and self._overtaken(v, site, sinks):
            return True
        repeated = any(s.node.op is basic.broadcast_to and _grows(s.node) for s in self.uses.used[v])
        into = any(self.uses.last(site, s) != s.number for s in sinks)
        return (
            (len(sinks) > 1 and cost >= REUSED) or (into and cost >= INTO_LOOP) or (repeated and cost >= REPEATED)
        )  # fmt: skip

    def sinks(self, v: Value) -> Sinks:
        """Where the elements of a value are read by something that is not computed lazily itself."""
        if v not in self._sinks:
            found: Sinks = {}
            for use in self.uses.used[v]:
                for sink, straight in self._through(v, use).items():
                    found[sink] = found.get(sink, True) and straight
            self._sinks[v] = found
        return self._sinks[v]

    def _through(self, v: Value, use: Site) -> Sinks:
        node = use.node
        if not self.uses.is_made_at(use):
            return {use: _stays(v, node)}
        out = node.results[0]
        if is_lazy(node.op) and is_block(out):
            straight = node.op.pointwise
            if out in self.held:
                return {use: straight}
            return {s: ok and straight for s, ok in self.sinks(out).items()}
        # The operands of a joined dot are read where its sum is made.
        sums = [total for total, dot in self.joined.items() if dot is out]
        return {self.uses.made[sums[0]]: False} if sums else {use: _stays(v, node)}

    def _overtaken(self, v: Value, site: Site, sinks: Sinks) -> bool:
        """Whether what a load reads may be written again before it is needed."""
        ref = site.node.args[0]
        writes = [w for r in (self._same if ref in self._same else (ref,)) for w in self.uses.writes[r]]
        for sink, straight in sinks.items():
            last = self.uses.last(site, sink)
            for write in writes:
                itself = write is sink and straight and _same_place(site.node, write.node)
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
            lazy = site is not None and is_block(v) and is_lazy(site.node.op) and v in site.node.results
            self._costs[v] = self._lazy_cost(site.node) if lazy and site is not None else 1
        return self._costs[v]

    def _lazy_cost(self, node: Node) -> int:
        own = 1 if node.op is tile.load else COST.get(node.op, 1)
        return min(1000, own + sum(self.cost(a) for a in node.args if is_block(a)))


def _carried(node: Node) -> list[tuple[Value, Value]]:
    """The pairs (parameter, what it becomes) of a loop."""
    if node.op is control.for_:
        return list(zip(node.regions[0].params[1:], node.regions[0].results, strict=True))
    if node.op is control.while_:
        return list(zip(node.regions[1].params, node.regions[1].results, strict=True))
    return []


def _grows(node: Node) -> bool:
    return math.prod(sizes(node.out.type)) > math.prod(sizes(node.args[0].type))


def _stays(v: Value, node: Node) -> bool:
    """Whether a node reads each element where it writes it: a store, or a loop that takes its start from it."""
    if node.op is tile.store:
        return v.type.shape == node.args[1].type.shape
    return node.op in LOOPS


def _same_place(load: Node, store: Node) -> bool:
    if store.op is not tile.store or load.op is not tile.load or load.args[0] is not store.args[0]:
        return False
    rank = load.args[0].type.rank
    return load.args[1 : 1 + rank] == store.args[2 : 2 + rank] and load.out.type.shape == store.args[1].type.shape
