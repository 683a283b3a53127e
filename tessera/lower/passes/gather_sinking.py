"""Gather sinking: few elements of what is computed from a tensor are computed from those elements of it.

The loss of a classifier picks one log-probability of each row. Without this rewrite a kernel writes all of them, and a
second one reads those; with it a kernel finds two numbers of each row, and computes the rest for the picked elements.
Casts to wider types sink to their first use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera.core.symbolic_dim import Size
from tessera.core.types import int64
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.ops.tensor import basic, elementwise, shape
from tessera.ops.tensor.coercion import is_narrow
from tessera.ops.tensor.shape import count_elements

MIN_RATIO = 8  # elements of the source for each one that is picked
MAX_OPS = 16  # that are computed again for the picked elements
MAX_LEAVES = 4  # tensors that they are computed from

patterns = RewritePatterns("gather sinking", same_types=True)


def sink_gathers(function: Function) -> Function:
    """Rewrite the gathers of a function that read what only they use."""
    return rewrite_function(function, patterns, remove_dead=True)


@patterns(shape.gather)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    pick = match_pick(rewriter.uses, node)
    recomputed = _find_recomputed(rewriter.uses, pick) if pick is not None else None
    return None if pick is None or recomputed is None else SunkGather(rewriter, pick, recomputed).compute()


@dataclass(frozen=True)
class Pick:
    """For each place of a result of shape `sizes`, an element of `source`: its own index along some axes, and along
    those in `places` an index of 0 or more."""

    source: Value
    sizes: tuple[Size, ...]
    places: dict[int, Value]


def match_pick(uses: UseDef, node: Node) -> Pick | None:
    """The pick that a gather from a flat tensor is, if its indices are a sum over the axes (see `take_along_axis`)."""
    flat = uses.find(node.args[0], shape.reshape)
    sizes = get_shape(node.args[1])
    if flat is None or uses.count_uses(node.args[0]) > 1 or uses.count_uses(flat.args[0]) > 1:
        return None
    source = get_shape(flat.args[0])
    static = all(isinstance(n, int) for n in (*source, *sizes))
    if len(get_shape(flat.out)) != 1 or len(source) != len(sizes) or not static:
        return None
    steps = {a: _find_step(source, a) for a, n in enumerate(source) if n != 1}
    places: dict[int, Value] = {}
    for term in _list_terms(uses, node.args[1]):
        if not _match_term(uses, term, source, sizes, steps, places):
            return None
    return None if steps else Pick(flat.args[0], sizes, places)


def _find_step(sizes: Sequence[Size], axis: int) -> Size:
    return count_elements(sizes[axis + 1 :])


def _list_terms(uses: UseDef, value: Value) -> list[Value]:
    total = uses.find(value, elementwise.add)
    return [value] if total is None else [t for v in total.args for t in _list_terms(uses, v)]


def _match_term(
    uses: UseDef, term: Value, source: Sequence[Size], sizes: Sequence[Size], steps: dict[int, Size],
    places: dict[int, Value],
) -> bool:  # fmt: skip
    """Whether a term of the indices is an index along one of the axes in `steps`, which it takes out of them; or 0."""
    if _find_number(uses, term) == 0:
        return True
    product = uses.find(term, elementwise.mul)
    step = _find_number(uses, product.args[1]) if product is not None else 1
    made = uses.find(product.args[0] if product is not None else term, shape.iota, shape.check_index)
    if made is None:
        return False
    if made.op is shape.iota:
        axis = made.attrs["axis"] % len(sizes)
        if sizes[axis] == 1:
            return True
        fits = sizes[axis] == source[axis] and steps.get(axis) == step
    else:
        axis = next((a for a, n in steps.items() if n == step), -1)
        fits = axis >= 0 and made.attrs["size"] == source[axis]
        places[axis] = made.out
    return fits and steps.pop(axis) == step


def _find_number(uses: UseDef, value: Value) -> int | None:
    node = uses.find(value, basic.full)
    return None if node is None else node.attrs["value"]


def _find_recomputed(uses: UseDef, pick: Pick) -> set[Value] | None:
    """The values that pointwise ops compute for the picked elements alone, or None where that does not pay.

    There is none where the source repeats a smaller tensor, whose elements are picked instead.
    """
    if uses.find(pick.source, basic.broadcast_to) is not None:
        return set()
    found: set[Node] = set()
    reached, leaves = {pick.source}, set[Value]()
    for node in reversed(uses.backward_slice([pick.source])):  # a value comes after all its users
        if reached.isdisjoint(node.results):
            continue
        held = node.out is pick.source or found.issuperset(uses.users(node.out))
        if not _is_pointwise(node) or (not held and _ends_kernel(uses, node)):
            leaves.add(node.out)
            continue
        found.add(node)
        reached.update(node.args)
        if len(found) > MAX_OPS:
            return None
    leaves = {v for v in leaves | (reached - set(uses)) if uses.find(v, basic.full) is None}
    few = math.prod(pick.sizes) * MIN_RATIO <= math.prod(get_shape(pick.source))
    return {n.out for n in found} if few and found and len(leaves) <= MAX_LEAVES else None


def _is_pointwise(node: Node) -> bool:
    """Whether each element of a node's result is computed from those of its operands at the same place."""
    values = (node.out, *node.args) if len(node.results) == 1 else ()
    same = all(get_shape(v) == get_shape(node.out) and get_tensor_type(v).policy is None for v in values)
    return node.op.pointwise and node.op is not shape.check_index and same and len(values) > 1


def _ends_kernel(uses: UseDef, node: Node) -> bool:
    """Whether a pointwise node is what a kernel, as that of a product, makes of its result before it stores it: nothing
    else reads that result."""
    inside = {node}
    for each in reversed(uses.backward_slice(node.args)):
        if inside.issuperset(uses.users(each.out)) and uses.users(each.out):
            if not _is_pointwise(each) and each.op not in (basic.full, basic.broadcast_to):
                return True
            if _is_pointwise(each):
                inside.add(each)
    return False


class SunkGather:
    """A pick of a value as what is computed from picks of others."""

    def __init__(self, rewriter: Rewriter, pick: Pick, recomputed: set[Value]) -> None:
        self.rewriter = rewriter
        self.pick = pick
        self.recomputed = recomputed
        self.made: dict[Value, Value] = {}

    def compute(self) -> Value:
        """The picked elements of the source."""
        return self._pick(self.pick.source)

    def _pick(self, value: Value) -> Value:
        if value not in self.made:
            self.made[value] = self._make(value)
        return self.made[value]

    def _make(self, value: Value) -> Value:
        uses, add = self.rewriter.uses, self.rewriter.add
        if value in self.recomputed:
            node = uses[value]
            return add(node.op, *(self._pick(a) for a in node.args), **node.attrs)
        constant, spread = uses.find(value, basic.full), uses.find(value, basic.broadcast_to)
        if constant is not None:
            return add(basic.full, **{**constant.attrs, "shape": self.pick.sizes})
        return self._take(spread.args[0] if spread is not None else value)

    def _take(self, leaf: Value) -> Value:
        """The elements of a tensor that is broadcast to the source; all of them, where none of its axes is picked."""
        add, sizes = self.rewriter.add, (1,) * (len(self.pick.sizes) - len(get_shape(leaf))) + tuple(get_shape(leaf))
        if all(sizes[a] == 1 for a in self.pick.places):
            return add(
                basic.broadcast_to, add(shape.reshape, self.rewriter.new(leaf), shape=sizes), shape=self.pick.sizes
            )
        flat = add(shape.reshape, self.rewriter.new(leaf), shape=(count_elements(sizes),))
        return add(shape.gather, flat, self._count(sizes), axis=-1)

    def _count(self, sizes: Sequence[Size]) -> Value:
        """The flat indices of the picked elements of a tensor of these sizes."""
        add, total = self.rewriter.add, None
        for axis in (a for a, n in enumerate(sizes) if n != 1):
            place = self.pick.places.get(axis)
            along = self.rewriter.new(place) if place is not None else self._iota(axis)
            step = add(basic.full, shape=self.pick.sizes, value=_find_step(sizes, axis), dtype=along.type.dtype)
            term = add(elementwise.mul, along, step)
            total = term if total is None else add(elementwise.add, total, term)
        assert total is not None
        return total

    def _iota(self, axis: int) -> Value:
        return self.rewriter.add(shape.iota, shape=self.pick.sizes, axis=axis - len(self.pick.sizes), dtype=int64)


def sink_widening(function: Function) -> Function:
    """Code sinking: each cast to a wider type is directly before its first use; registers then hold narrow values."""
    waiting: dict[Value, Node] = {}
    nodes: list[Node] = []
    for node in function.body.nodes:
        if node.op is basic.cast and is_narrow(get_tensor_type(node.args[0]).with_shape(())):
            waiting[node.out] = node
        else:
            _place_after_casts(node, waiting, nodes)
    while waiting:
        _place_after_casts(waiting.pop(next(iter(waiting))), waiting, nodes)
    return replace(function, body=Block(function.body.params, tuple(nodes), function.body.results))


def _place_after_casts(node: Node, waiting: dict[Value, Node], nodes: list[Node]) -> None:
    """Append a node, and before it the waiting casts that it uses."""
    for value in list(waiting) if node.regions else node.args:
        if value in waiting:
            _place_after_casts(waiting.pop(value), waiting, nodes)
    nodes.append(node)
