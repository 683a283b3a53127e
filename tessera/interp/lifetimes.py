"""When values are used last: a program that drops them there works in memory that the processor still holds."""

from __future__ import annotations

from tessera.ir.core import Block, Node, Value


def last_uses(block: Block) -> dict[Node, tuple[Value, ...]]:
    """For each node the values made in this block that nothing after it uses, here or in an inner region."""
    made = {v for node in block.nodes for v in node.results}
    needed: set[Value] = set(block.results)
    found: dict[Node, tuple[Value, ...]] = {}
    for node in reversed(block.nodes):
        used = {*node.args, *node.results, *(v for region in node.regions for v in region.free)}
        found[node] = tuple(v for v in used & made if v not in needed)
        needed |= used
    return found
