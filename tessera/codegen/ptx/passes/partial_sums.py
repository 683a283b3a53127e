"""Partial sums: a loop that adds sums of blocks to what it carries adds up the blocks, which are summed up after it.

So are largest and smallest elements. Threads that hold parts of one sum exchange them after the loop rather than in
each round, which takes two barriers and a pass through shared memory.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.multistage_pipelining import count_rounds
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ir.rewrite import UseDef, eliminate_dead_code
from tessera.lower.passes.canonicalisation import COMBINERS
from tessera.lower.passes.reduction_splitting import KINDS
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import basic, reduce, shape

MAX_HELD = 16  # elements of a block of partial sums that a thread holds
FOLDED = 8  # of a larger block, which is folded first
MAX_VECTOR = 8  # neighbours that a thread holds: fewer sums than threads with so many are parts of several threads


def carry_partial_sums(function: Function, threads: int) -> Function:
    """The function whose loops carry blocks of partial sums, where these fit the registers of its threads."""
    if function.attrs.get("group", 1) > 1:  # a thread holds whole blocks
        return function
    return eliminate_dead_code(replace(function, body=_carry_in_block(function.body, UseDef(function), threads)))


def _carry_in_block(block: Block, uses: UseDef, threads: int) -> Block:
    order: list[Node] = []
    for node in block.nodes:
        if node.regions:
            node = replace(node, regions=tuple(_carry_in_block(r, uses, threads) for r in node.regions))
        order += _carry_in_loop(node, uses, threads) if node.op is control_flow.for_ else [node]
    return replace(block, nodes=tuple(order))


def _carry_in_loop(loop: Node, uses: UseDef, threads: int) -> list[Node]:
    """A loop as it is, or with blocks in place of their sums, between what fills the blocks and what sums them up."""
    (body,) = loop.regions
    before, after, dropped = list[Node](), list[Node](), set[Node]()
    args, params, results, outs = list(loop.args), list(body.params), list(body.results), list(loop.results)
    added, several = list[Node](), count_rounds(uses, loop) > 1
    for i, out in enumerate(loop.results):
        found = _find_sum(body, params[1 + i], results[i], uses, threads, several)
        if found is None:
            continue
        (total, join), initial = found, args[3 + i]
        x, attrs_of_total = _find_summed_block(total, uses)
        if (folded := _fold(x, total, threads) if several else None) is not None:
            added += folded
            x, attrs_of_total = folded[-1].out, Attrs({**total.attrs, "axis": (-1,)})
        filled, held, joined, last, summed = (Value(v.type) for v in (x, x, x, x, total.out))
        neutral = reduce.find_neutral_element(KINDS[total.op], x.type.dtype)  # type: ignore[union-attr]
        attrs = Attrs({"shape": x.type.shape, "value": neutral, "dtype": x.type.dtype})  # type: ignore[union-attr]
        before.append(Node(basic.full, (), attrs, (filled,), (), total.loc))
        added.append(Node(join.op, (held, x), Attrs({}), (joined,), (), join.loc))
        after.append(Node(total.op, (last,), attrs_of_total, (summed,), (), total.loc))
        after.append(Node(join.op, (initial, summed), Attrs({}), (out,), (), join.loc))
        args[3 + i], params[1 + i], results[i], outs[i] = filled, held, joined, last
        dropped |= {total, join}
    if not dropped:
        return [loop]
    nodes = (*(n for n in body.nodes if n not in dropped), *added)
    region = Block(tuple(params), nodes, tuple(results))
    return [*before, replace(loop, args=tuple(args), results=tuple(outs), regions=(region,)), *after]


def _find_summed_block(total: Node, uses: UseDef) -> tuple[Value, Attrs]:
    """The block that is summed up, and the attributes of its sum: one of all elements needs no other shape of it."""
    (x,), attrs = total.args, total.attrs
    if static_shape(total.out):
        return x, attrs
    while (node := uses.find(x, shape.reshape)) is not None:
        (x,) = node.args
    return x, Attrs({**attrs, "axis": tuple(range(-x.type.rank, 0))})  # type: ignore[union-attr]


def _fold(x: Value, total: Node, threads: int) -> list[Node] | None:
    """The nodes that add up parts of a large row, of which a thread holds the same places; None for other blocks."""
    sizes, length = static_shape(x), FOLDED * threads
    columns = math.prod(sizes)
    if (
        not sizes
        or columns != sizes[-1]
        or columns <= MAX_HELD * threads
        or columns % length
        or static_shape(total.out)
    ):
        return None
    parts, folded = (Value(x.type.with_shape(s)) for s in ((columns // length, length), (length,)))  # type: ignore[union-attr]
    view = Node(shape.reshape, (x,), Attrs({"shape": static_shape(parts)}), (parts,), (), total.loc)
    return [view, Node(total.op, (parts,), Attrs({**total.attrs, "axis": (0,)}), (folded,), (), total.loc)]


def _find_sum(
    body: Block, param: Value, result: Value, uses: UseDef, threads: int, several: bool
) -> tuple[Node, Node] | None:
    """The sum of a block that a loop, of `several` rounds, adds to a carried value, and the addition, if nothing else
    reads either."""
    join = uses.find(result, *COMBINERS.values())
    if join is None or join not in body.nodes or param not in join.args or uses.count_uses(param) != 1:
        return None
    total = uses.find(next((v for v in join.args if v is not param), param), *COMBINERS)
    if total is None or COMBINERS[total.op] is not join.op or total not in body.nodes:
        return None
    if uses.count_uses(total.out) != 1 or uses.count_uses(result) != 1:
        return None
    x = total.args[0].type
    if x != total.out.type.with_shape(x.shape) or x.policy is not None:  # type: ignore[union-attr]
        return None
    if total.op is reduce.sum and x.accumulate != x.dtype:  # type: ignore[union-attr]  # each sum is rounded once
        return None
    block, _ = _find_summed_block(total, uses)
    if several and _fold(block, total, threads) is not None:
        return total, join
    held, sums = (math.prod(1 << (n - 1).bit_length() for n in static_shape(v)) for v in (block, total.out))
    return (total, join) if held <= MAX_HELD * threads and sums < MAX_VECTOR * threads else None
