"""Nodes that nothing uses taken away: what reading a kernel leaves behind."""

from __future__ import annotations

import dataclasses

from tessera.ir.core import Block, Node, Value
from tessera.ops import tile


def prune(block: Block) -> Block:
    """A block without pure nodes and buffers whose results are not used."""
    return _pruned(block, set())


def _pruned(block: Block, used: set[Value]) -> Block:
    used |= set(block.results)
    kept: list[Node] = []
    for node in reversed(block.nodes):
        if _removable(node) and not used & set(node.results):
            continue
        used |= set(node.args)
        if node.regions:
            node = dataclasses.replace(node, regions=tuple(_pruned(r, used) for r in node.regions))
        kept.append(node)
    return dataclasses.replace(block, nodes=tuple(reversed(kept)))


def _removable(node: Node) -> bool:
    inner = (n for r in node.regions for n in r.walk())
    return node.op is tile.alloc or not any(n.op.effects for n in (node, *inner))
