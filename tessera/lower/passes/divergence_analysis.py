"""Divergence analysis (static): which values of a tile function differ between the tiles of a group (Coutinho et al.
2011)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from tessera.core.types import REGISTER, RefType
from tessera.ir.core import Block, Node, Value
from tessera.ops.dialects import control_flow, tile
from tessera.ops.dialects.mbarrier import mbarrier_wait

_LOCKSTEP_OPS = (tile.collect, tile.exchange, tile.meet)
# What differs between tiles whatever it is given.
_DIVERGENT_OPS = (tile.local_id, tile.atomic, tile.compare_exchange)


@lru_cache(maxsize=1024)
def find_lockstep_width(*blocks: Block) -> int:
    """How many tiles, side by side, have to go together through blocks in which stretches exchange values or meet."""
    widths = {int(n.attrs["width"]) for b in blocks for n in b.walk() if n.op in _LOCKSTEP_OPS}
    return math.lcm(*widths)


class DivergenceAnalysis:
    """A walk that follows values which differ between tiles; `uneven`: an mbarrier waited at, or a parity, is one."""

    def __init__(self, values: set[Value]) -> None:
        self.values = values
        self.uneven = False

    def walk(self, block: Block) -> None:
        """Follow them through a block."""
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
        """A round of a loop: what it begins with and what the last round has left."""
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
    """Whether a node reads memory of which each tile has its own."""
    refs = [v.type for v in node.args if isinstance(v.type, RefType)]
    return any(ref.space == REGISTER for ref in refs)
