"""Common subexpressions: of nodes that compute the same, only the first is kept."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.levels import FLOW


def share(function: Function) -> Function:
    """A function in which nothing pure is computed twice."""
    return replace(function, body=shared(function.body))


def shared(block: Block) -> Block:
    """A block, inner regions included, in which nothing pure is computed twice."""
    return _shared(block, {}, {})


def _shared(block: Block, known: dict[Hashable, tuple[Value, ...]], names: dict[Value, Value]) -> Block:
    kept = []
    for node in block.nodes:
        node = _renamed(node, known, names)
        if node.regions or node.op.effects:
            kept.append(node)
            continue
        same = known.setdefault(_key(node), node.results)
        if same is node.results:
            kept.append(node)
        names.update(zip(node.results, same, strict=True))
    return Block(block.params, tuple(kept), tuple(names.get(v, v) for v in block.results))


def _renamed(node: Node, known: dict[Hashable, tuple[Value, ...]], names: dict[Value, Value]) -> Node:
    args = tuple(names.get(v, v) for v in node.args)
    # What an inner region adds is known only inside it; that of a loop over tensors takes all it uses as a parameter.
    outside = {} if node.op.name in FLOW else known
    regions = tuple(_shared(r, dict(outside), names) for r in node.regions)
    return replace(node, args=args, regions=regions) if regions or args != node.args else node


def _key(node: Node) -> Hashable:
    # As text, since 1, 1.0 and True are equal in Python, and 0.0 and -0.0.
    return node.op, node.args, repr(node.attrs), tuple(v.type for v in node.results)
