"""The pass that begins loads early: before barriers of reductions, so that memory works while threads wait."""

from __future__ import annotations

import math

from tessera.codegen.ptx.passes.infer import sizes
from tessera.ir.core import Block, Function, Node, Value
from tessera.ops import basic, linalg, tile
from tessera.types import GLOBAL

MOST = 1 << 15  # elements: half of the registers of a multiprocessor


def loads_first(function: Function, most: int = MOST) -> Function:
    """The function with each load of memory that it never writes as early in its block as its operands allow.

    Not where what is loaded are more than `most` elements, which would fill the registers, or operands of products.
    """
    held = sum(math.prod(sizes(n.out)) for n in function.body.walk() if n.op is tile.load)
    if held > most or any(n.op is linalg.dot for n in function.body.walk()):
        return function
    written = {node.args[0] for node in function.body.walk() if "write" in node.op.effects}
    body = _moved(function.body, frozenset(written))
    return Function(function.name, body, function.attrs, function.loc)


def _moved(block: Block, written: frozenset[Value]) -> Block:
    order = [node for node in block.nodes if node.op is basic.full]
    for node in block.nodes:
        if node.op is basic.full:
            continue
        if _free(node, written):
            order.insert(_earliest(order, node, written), node)
        else:
            order.append(node)
    return Block(block.params, tuple(order), block.results)


def _free(node: Node, written: frozenset[Value]) -> bool:
    """Whether a load may be moved: nothing changes what it reads."""
    return node.op is tile.load and node.args[0].type.space == GLOBAL and node.args[0] not in written  # type: ignore[union-attr]


def _earliest(order: list[Node], node: Node, written: frozenset[Value]) -> int:
    """Right after the last node that gives an operand, and after loads that came before."""
    operands = set(node.args)
    for place in range(len(order), 0, -1):
        before = order[place - 1]
        if _free(before, written) or operands & set(before.results):
            return place
    return 0
