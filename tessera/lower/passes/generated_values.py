"""Generated values: random numbers that a reduction reads are held in memory, not computed inside of its kernel.

A pointwise kernel computes the words of a block of the random generator once for all elements that take one of them. A
kernel of rows would compute the block for each element, in registers that its rows need.
"""

from __future__ import annotations

from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.lower.indexing_maps import get_shape
from tessera.lower.lowering_plan import LoweringPlan
from tessera.ops.tensor import basic, shape

LEAST_DEPTH = 24  # ops, one on the result of the other, that are not worth doing for each element
SOURCES = (shape.iota, basic.full)
VIEWS = (shape.reshape, shape.slice_, shape.permute, basic.broadcast_to)


def hold_generated_values(function: Function, plan: LoweringPlan) -> Function:
    """A function in which reductions read random numbers from memory, where kernels run in parallel."""
    if plan.parallel is None:
        return function
    held = find_held(function)
    patterns = RewritePatterns("generated values", same_types=True)

    @patterns(*{n.op: None for n in held})
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        if node not in held:
            return None
        return rewriter.add(basic.fusion_barrier, rewriter.add(node.op, *args, **node.attrs))

    return rewrite_function(function, patterns) if held else function


def find_held(function: Function) -> set[Node]:
    """The nodes whose results depend on no array, take many ops and are read by what a reduction reads."""
    uses = UseDef(function)
    depths = find_depths(function)
    reduced = find_reduced(function)
    last = [v for v in depths if any(not depths.keys() >= set(u.results) for u in uses.users(v))]
    held = [_find_narrow(uses, v) for v in last if depths[v] >= LEAST_DEPTH and v in reduced]
    return {uses[v] for v in held if v in uses}


def _find_narrow(uses: UseDef, value: Value) -> Value:
    """A value before it is repeated."""
    while (node := uses.find(value, basic.broadcast_to)) is not None:
        value = node.args[0]
    return value


def find_depths(function: Function) -> dict[Value, int]:
    """How many pointwise ops follow each other up to each value that depends on places and scalars alone."""
    depths: dict[Value, int] = {v: 0 for v in function.body.params if get_shape(v) == ()}
    for node in function.body.nodes:
        if node.op in SOURCES or (node.op in VIEWS or node.op.pointwise) and all(v in depths for v in node.args):
            depths |= {v: max((depths[x] for x in node.args), default=0) + node.op.pointwise for v in node.results}
    return depths


def find_reduced(function: Function) -> set[Value]:
    """What ops that are neither pointwise nor views read, also through such ops."""
    reduced: set[Value] = set()
    for node in reversed(function.body.nodes):
        through = node.op.pointwise or node.op in VIEWS
        if not through or not reduced.isdisjoint(node.results):
            reduced.update(node.args)
    return reduced
