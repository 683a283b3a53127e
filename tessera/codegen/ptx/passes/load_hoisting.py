"""Load hoisting: moves loads as early in their block as their operands allow, before the barriers of reductions."""

from __future__ import annotations

import math

from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.core.types import GLOBAL
from tessera.ir.core import Block, Function, Node, Value
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, contractions

MAX_HOISTED_ELEMENTS = 1 << 15  # elements: half of the registers of a multiprocessor
MAX_EARLY_LOADED = 1024  # elements, where products that leave few registers come between a load and its use


def hoist_loads(function: Function, most: int = MAX_HOISTED_ELEMENTS) -> Function:
    """Hoist each load from memory that the function never writes.

    Functions that load more than `most` elements, which would fill the registers, or that have products are unchanged.
    """
    held = sum(math.prod(static_shape(n.out)) for n in function.body.walk() if n.op is tile.load)
    if held > most or any(n.op is contractions.dot for n in function.body.walk()):
        return function
    written = {node.args[0] for node in function.body.walk() if "write" in node.op.effects}
    body = _hoist_in_block(function.body, frozenset(written))
    return Function(function.name, body, function.attrs, function.loc)


def _hoist_in_block(block: Block, written: frozenset[Value]) -> Block:
    order = [node for node in block.nodes if node.op is basic.full]
    for node in block.nodes:
        if node.op is basic.full:
            continue
        if _is_movable_load(node, written):
            order.insert(_find_earliest_position(order, node, written), node)
        else:
            order.append(node)
    return Block(block.params, tuple(order), block.results)


def _is_movable_load(node: Node, written: frozenset[Value]) -> bool:
    """Whether a load reads global memory that the function never writes."""
    return node.op is tile.load and node.args[0].type.space == GLOBAL and node.args[0] not in written  # type: ignore[union-attr]


def _find_earliest_position(order: list[Node], node: Node, written: frozenset[Value]) -> int:
    """The position after the last node that defines an operand, and after the loads that are hoisted already."""
    operands = set(node.args)
    for place in range(len(order), 0, -1):
        before = order[place - 1]
        if _is_movable_load(before, written) or operands & set(before.results):
            return place
    return 0
