"""Emitter: the walk over a tile function that emits each node by its rule of the emission table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tessera.codegen.coverage import make_refusal_error
from tessera.codegen.ptx.context import EmissionContext, at_location
from tessera.codegen.ptx.table import REFUSED, emission_rule
from tessera.codegen.ptx.table.blocks.elementwise import emit_elementwise
from tessera.codegen.ptx.table.warpgroup.mma_queue import wait_for_all, wait_for_results
from tessera.ir.core import Block, Node
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import basic, shape

# Ops that only bind registers: they may move above elementwise ops whose results they do not use.
REGISTER_BINDING_OPS = (basic.full, basic.dim_value, basic.broadcast_to, shape.iota)


def emit_block(ctx: EmissionContext, block: Block) -> None:
    """Emit the nodes of a block in order; adjacent elementwise ops together, so that large blocks go by element."""
    chain: list[Node] = []
    for node in block.nodes:
        if node.op.pointwise and emission_rule.get(node.op) is None:
            ctx.analyses.producers.update(dict.fromkeys(node.results, node))
            chain.append(node)
            continue
        if node.op not in REGISTER_BINDING_OPS or {n.out for n in chain} & set(node.args):
            _flush_elementwise(ctx, chain)
        emit_node(ctx, node)
    _flush_elementwise(ctx, chain)


def _flush_elementwise(ctx: EmissionContext, chain: list[Node]) -> None:
    """Emit the deferred elementwise nodes, those with equal register counts as one group."""
    for _, group in groupby(chain, lambda node: ctx.layout(node.out).count):
        nodes = list(group)
        _wait_for_operands(ctx, nodes)
        emit_elementwise(ctx, nodes)
    chain.clear()


def _wait_for_operands(ctx: EmissionContext, nodes: Sequence[Node]) -> None:
    """Wait for the MMAs in flight whose results some nodes use; before a branch or a while loop, for all of them."""
    if any(node.regions and node.op is not control_flow.for_ for node in nodes):
        wait_for_all(ctx)
    elif not any(node.regions for node in nodes):
        wait_for_results(ctx, [v for node in nodes for v in node.args])


def emit_node(ctx: EmissionContext, node: Node) -> None:
    """Emit one node, after the barrier and the waits that its operands need.

    Raises:
        UnsupportedOpError: the table has no rule for the op.
    """
    ctx.analyses.producers.update(dict.fromkeys(node.results, node))
    _wait_for_operands(ctx, [node])
    with at_location(ctx, node):
        if ctx.smem.hazards.needs_barrier(node):
            ctx.team.synchronise()
        rule = emission_rule.get(node.op)
        if rule is not None:
            rule(ctx, node)
        elif node.op.pointwise:
            emit_elementwise(ctx, [node])
        else:
            raise make_refusal_error("ptx", node, REFUSED)
