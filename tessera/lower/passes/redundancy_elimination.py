"""Redundancy elimination: common subexpressions (CSE) and dead code (DCE)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.levels import FLOW_OPS

# Common subexpressions: of nodes that compute the same, only the first is kept.


def eliminate_common_subexpressions(function: Function) -> Function:
    """A function in which nothing pure is computed twice."""
    return replace(function, body=cse_block(function.body))


def cse_block(block: Block) -> Block:
    """A block, inner regions included, in which nothing pure is computed twice."""
    return _cse_nodes(block, {}, {})


def _cse_nodes(block: Block, known: dict[Hashable, tuple[Value, ...]], names: dict[Value, Value]) -> Block:
    kept = []
    for node in block.nodes:
        node = _rename_operands(node, known, names)
        if node.regions or node.op.effects:
            kept.append(node)
            continue
        same = known.setdefault(_make_expression_key(node), node.results)
        if same is node.results:
            kept.append(node)
        names.update(zip(node.results, same, strict=True))
    return Block(block.params, tuple(kept), tuple(names.get(v, v) for v in block.results))


def _rename_operands(node: Node, known: dict[Hashable, tuple[Value, ...]], names: dict[Value, Value]) -> Node:
    args = tuple(names.get(v, v) for v in node.args)
    # What an inner region adds is known only inside it; that of a loop over tensors takes all it uses as a parameter.
    outside = {} if node.op.name in FLOW_OPS else known
    regions = tuple(_cse_nodes(r, dict(outside), names) for r in node.regions)
    return replace(node, args=args, regions=regions) if regions or args != node.args else node


def _make_expression_key(node: Node) -> Hashable:
    # As text, since 1, 1.0 and True are equal in Python, and 0.0 and -0.0.
    return node.op, node.args, repr(node.attrs), tuple(v.type for v in node.results)


# Dead code: nodes whose results nothing uses and that do nothing else are left out.


SCAN = "ts.scan"


def eliminate_dead_code(function: Function) -> Function:
    """A function without dead nodes."""
    return replace(function, body=dce_block(function.body))


def dce_block(block: Block) -> Block:
    """A block without dead nodes, inner regions included."""
    return _dce_nodes(block, set())


def _dce_nodes(block: Block, live: set[Value]) -> Block:
    live.update(block.results)
    kept: list[Node] = []
    for node in reversed(block.nodes):
        if live.isdisjoint(node.results) and not has_effect(node):
            continue
        node = _drop_dead_stacks(node, live) if node.op.name == SCAN else node
        if node.regions:
            node = replace(node, regions=tuple(_dce_nodes(r, live) for r in node.regions))
        live.update(node.args)
        kept.append(node)
    return Block(block.params, tuple(reversed(kept)), block.results)


def _drop_dead_stacks(node: Node, live: set[Value]) -> Node:
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
