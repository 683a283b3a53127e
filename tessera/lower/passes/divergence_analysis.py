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
