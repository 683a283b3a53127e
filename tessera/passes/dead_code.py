"""Dead code: nodes whose results nothing uses and that do nothing else are left out."""

from __future__ import annotations

from dataclasses import replace

from tessera.ir.core import Block, Function, Node, Value

SCAN = "ts.scan"


def sweep(function: Function) -> Function:
    """A function without dead nodes."""
    return replace(function, body=swept(function.body))


def swept(block: Block) -> Block:
    """A block without dead nodes, inner regions included."""
    return _swept(block, set())


def _swept(block: Block, live: set[Value]) -> Block:
    live.update(block.results)
    kept: list[Node] = []
    for node in reversed(block.nodes):
        if live.isdisjoint(node.results) and not has_effect(node):
            continue
        node = _trimmed(node, live) if node.op.name == SCAN else node
        if node.regions:
            node = replace(node, regions=tuple(_swept(r, live) for r in node.regions))
        live.update(node.args)
        kept.append(node)
    return Block(block.params, tuple(reversed(kept)), block.results)


def _trimmed(node: Node, live: set[Value]) -> Node:
    """A scan without the stacks of results that nothing uses; the states go on."""
    carry = node.attrs["carry"]
    kept = [i for i, v in enumerate(node.results) if i < carry or v in live]
    if len(kept) == len(node.results):
        return node
    (body,) = node.regions
    body = replace(body, results=tuple(body.results[i] for i in kept))
    return replace(node, results=tuple(node.results[i] for i in kept), regions=(body,))


def has_effect(node: Node) -> bool:
    """Whether a node does more than give its results; reading is nothing more."""
    return bool(node.op.effects - {"read"}) or any(has_effect(n) for r in node.regions for n in r.nodes)
