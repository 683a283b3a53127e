"""Generated values: random numbers that a kernel would compute word by word are held in memory.

A pointwise kernel computes the words of a block of the random generator once for all elements that take one of them. A
kernel of rows would compute the block for each element, in registers that its rows need; and so would any kernel whose
elements are no whole blocks, which costs more than memory where the numbers become bools.
"""

from __future__ import annotations

from tessera.core.symbolic_dim import Size
from tessera.core.types import bool_
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.lower.indexing_maps import TOTAL, get_shape, get_tensor_type
from tessera.lower.lowering_plan import LoweringPlan
from tessera.ops.tensor import basic, shape

LEAST_DEPTH = 24  # ops, one on the result of the other, that are not worth doing for each element
SOURCES = (shape.iota, basic.full)
VIEWS = (shape.reshape, shape.slice_, shape.permute, basic.broadcast_to)


def hold_generated_values(function: Function, plan: LoweringPlan) -> Function:
    """A function in which reductions read random numbers from memory, where programs run side by side."""
    if plan.parallel is None:
        return function
    held = find_held(function)
    patterns = RewritePatterns("generated values", same_types=True)

    @patterns(*{n.op: None for n in held})
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        if node not in held:
            return None
        whole = find_whole(rewriter.uses, node.out)
        if whole:
            return _hold_whole(rewriter, node.out, whole)
        return rewriter.add(basic.fusion_barrier, rewriter.add(node.op, *args, **node.attrs))

    return rewrite_function(function, patterns, remove_dead=True) if held else function


def _hold_whole(rewriter: Rewriter, value: Value, path: list[Node]) -> Value:
    """The first elements of what a value is part of: of whole blocks of words."""
    first, *rest = path
    held, sizes = rewriter.new(first.args[0]), get_shape(first.args[0])
    for node in rest:
        others = [v if _is_uniform(rewriter.uses, v) else None for v in node.args]
        args = [held if v is None else _spread(rewriter, v, sizes) for v in others]
        held = rewriter.add(node.op, *args, **node.attrs)
    part = rewriter.add(shape.slice_, rewriter.add(basic.fusion_barrier, held), **first.attrs)
    return rewriter.add(shape.reshape, part, shape=get_shape(value))


def _spread(rewriter: Rewriter, value: Value, sizes: tuple[Size, ...]) -> Value:
    """A number that is repeated, in another shape."""
    node = rewriter.uses[value]
    if node.op is basic.full:
        return rewriter.add(basic.full, **{**node.attrs, "shape": sizes})
    return rewriter.add(basic.broadcast_to, rewriter.new(node.args[0]), shape=sizes)


def find_held(function: Function) -> set[Node]:
    """The nodes whose results depend on no array, take many ops and are read by what a reduction reads, or are bools of
    parts of blocks."""
    uses = UseDef(function)
    depths = find_depths(function)
    reduced = find_reduced(function)
    last = [v for v in depths if any(not depths.keys() >= set(u.results) for u in uses.users(v))]
    held = [_find_narrow(uses, v) for v in last if depths[v] >= LEAST_DEPTH]
    return {uses[v] for v in held if v in uses and (v in reduced or _is_part(uses, v))}


def _is_part(uses: UseDef, value: Value) -> bool:
    """Whether a value is of bools, which take less memory than words take work, and is no whole blocks."""
    return get_tensor_type(value).dtype == bool_ and bool(find_whole(uses, value))


def find_whole(uses: UseDef, value: Value) -> list[Node]:
    """The nodes that make a value from whole blocks of words: a slice that leaves out the last ones, and pointwise ops
    with numbers; none where it is no such value."""
    path: list[Node] = []
    node = uses.get(value)
    while node is not None:
        varying = [v for v in node.args if not _is_uniform(uses, v)]
        if node.op is shape.slice_:
            plain = set(node.attrs["start"]) == {0} and set(node.attrs["step"]) == {1}
            return [node, *reversed(path)] if plain and len(get_shape(node.out)) == 1 else []
        if len(varying) != 1 or node.op not in (shape.reshape, *TOTAL):  # the elements left out have no index, say
            return []
        path += [node] if node.op is not shape.reshape else []
        node = uses.get(varying[0])
    return []


def _is_uniform(uses: UseDef, value: Value) -> bool:
    """Whether all elements of a value are one number."""
    node = uses.find(value, basic.full, basic.broadcast_to)
    return node is not None and (node.op is basic.full or get_shape(node.args[0]) == ())


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
