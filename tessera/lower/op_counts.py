"""Operation counts: the arithmetic of a Graph node by the types of its operands, composites by their lowering."""

from __future__ import annotations

import math

from tessera.core.symbolic_dim import estimate_size
from tessera.core.types import TensorType
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rewrite import expand_composites
from tessera.lower.op_chains import CONSTANT_OPS, VIEW_OPS
from tessera.ops.tensor import basic, contractions, shape

MOVES = (*VIEW_OPS, *CONSTANT_OPS, basic.cast, shape.slice_, shape.concatenate, shape.pad, shape.gather)


def count_elements(value: Value) -> int:
    """The elements of a tensor; 0 of anything else."""
    return math.prod(estimate_size(n) for n in value.type.shape) if isinstance(value.type, TensorType) else 0


def count_flops(node: Node) -> int:
    """The arithmetic operations of a node: 2 k for each element of a product of depth k, one for each of another op.

    Ops that only move elements count nothing, and neither do loops and branches, whose rounds are not known.
    """
    params = tuple(Value(v.type) for v in node.args)
    alone = Node(node.op, params, node.attrs, node.results, node.regions, node.loc)
    function = expand_composites(Function("node", Block(params, (alone,), alone.results)), lambda op: False)
    return sum(_count_primitive(n) for n in function.body.nodes)


def _count_primitive(node: Node) -> int:
    if node.regions or node.op in MOVES:
        return 0
    if node.op is contractions.dot:
        return 2 * count_elements(node.out) * int(estimate_size(node.args[0].type.shape[-1]))  # type: ignore[union-attr]
    return max((count_elements(v) for v in (*node.args, *node.results)), default=0)
