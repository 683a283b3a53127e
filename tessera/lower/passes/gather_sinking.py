"""Gather sinking: few elements of what is computed from a tensor are computed from those elements of it; and scatters
of few elements into each row, which are their gradients, as selections.

The loss of a classifier picks one log-probability of each row. Without this rewrite a kernel writes all of them, and a
second one reads those; with it a kernel finds two numbers of each row, and computes the rest for the picked elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.core.symbolic_dim import Size
from tessera.core.types import int32, int64
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.lower.op_chains import strip_views
from tessera.ops.tensor import basic, elementwise, scatter, shape
from tessera.ops.tensor.shape import count_elements

MIN_RATIO = 8  # elements of the source for each one that is picked
MAX_OPS = 16  # that are computed again for the picked elements
MAX_LEAVES = 4  # tensors that they are computed from
MOST_UPDATES = 4  # of a row, each of which is compared with all places of it

patterns = RewritePatterns("gather sinking", same_types=True)
scatters = RewritePatterns("row scatters", same_types=True)


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
    places = _match_places(uses, node.args[1], source, sizes)
    return None if places is None else Pick(flat.args[0], sizes, places)


def _match_places(
    uses: UseDef, indices: Value, source: Sequence[Size], sizes: Sequence[Size]
) -> dict[int, Value] | None:
    """The indices along some axes that flat indices of shape `sizes` into `source` are a sum of; None: of others."""
    steps = {a: _find_step(source, a) for a, n in enumerate(source) if n != 1}
    places: dict[int, Value] = {}
    matches = all(_match_term(uses, term, source, sizes, steps, places) for term in _list_terms(uses, indices))
    return places if matches and not steps else None


def _find_step(sizes: Sequence[Size], axis: int) -> Size:
    return count_elements(sizes[axis + 1 :])


def _list_terms(uses: UseDef, value: Value) -> list[Value]:
    total = uses.find(_strip_moves(uses, value), elementwise.add)
    return [value] if total is None else [t for v in total.args for t in _list_terms(uses, v)]


def _match_term(
    uses: UseDef, term: Value, source: Sequence[Size], sizes: Sequence[Size], steps: dict[int, Size],
    places: dict[int, Value],
) -> bool:  # fmt: skip
    """Whether a term of the indices is an index along one of the axes in `steps`, which it takes out of them; or 0."""
    if _find_number(uses, term) == 0:
        return True
    product = uses.find(_strip_moves(uses, term), elementwise.mul)
    step = _find_number(uses, product.args[1]) if product is not None else 1
    factor = product.args[0] if product is not None else term
    made = uses.find(_strip_moves(uses, factor), shape.iota, shape.check_index)
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
    node = uses.find(_strip_moves(uses, value), basic.full)
    return None if node is None else node.attrs["value"]


def _strip_moves(uses: UseDef, value: Value) -> Value:
    """An integer below broadcasts of one number and casts that change nothing, as before simplification."""
    node = uses.find(value, basic.cast, basic.broadcast_to)
    if node is None:
        return value
    below = get_tensor_type(node.args[0])
    same = below.dtype == get_tensor_type(value).dtype and (node.op is basic.cast or not below.shape)
    return _strip_moves(uses, node.args[0]) if same else value


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


# Scatters into rows.


def spread_scatters(function: Function) -> Function:
    """Scatters of few elements into each row of what is computed as selections: all places of a row are written once,
    where a scatter writes the row, sorts its updates and combines them."""
    return rewrite_function(function, scatters, remove_dead=True)


@scatters(scatter.scatter_add, scatter.scatter)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    found = match_row_updates(rewriter.uses, node) if node.attrs.get("mode", "set") == "set" else None
    if found is None or get_tensor_type(node.out).policy is not None:
        return None
    out = rewriter.add(shape.reshape, args[0], shape=found.source)
    updates = rewriter.add(shape.reshape, args[2], shape=found.sizes)
    place = rewriter.new(found.place)
    cuts = [[_cut_along(rewriter, v, found, i) for i in range(found.count)] for v in (place, updates)]
    parts = list(zip(*cuts, strict=True))
    if node.op is scatter.scatter_add:
        out = _add_updates(rewriter, out, parts, found)
    else:
        for place, part in parts:
            part = rewriter.add(basic.broadcast_to, part, shape=found.source)
            out = rewriter.add(elementwise.where, _compare_places(rewriter, place, found), part, out)
    return rewriter.add(shape.reshape, out, shape=get_shape(node.out))


@dataclass(frozen=True)
class RowUpdates:
    """Updates of shape `sizes` of a tensor of shape `source`, at the same indices but for `axis`, along which they are
    at `place`."""

    source: tuple[int, ...]
    sizes: tuple[int, ...]
    axis: int
    place: Value

    @property
    def count(self) -> int:
        """The updates of a row."""
        return self.sizes[self.axis]


def match_row_updates(uses: UseDef, node: Node) -> RowUpdates | None:
    """The updates of a scatter into a flat tensor that is computed, if each row has the same few."""
    (count, *rest), indices = get_shape(node.args[0]), node.args[1]
    view = uses.find(indices, shape.reshape)
    indices = indices if view is None else view.args[0]
    sizes = get_shape(indices)
    static = all(isinstance(n, int) and n > 0 for n in (count, *sizes))
    if rest or not static or len(sizes) < 2 or uses.get(strip_views(node.args[0], uses)) is None:
        return None
    for axis, n in enumerate(sizes):
        length, others = divmod(int(count) * int(n), int(count_elements(sizes)))
        source = (*sizes[:axis], length, *sizes[axis + 1 :])
        places = _match_places(uses, indices, source, sizes) if int(n) <= MOST_UPDATES and not others else None
        if places is not None and places.keys() == {axis}:
            return RowUpdates(source, tuple(sizes), axis, places[axis])  # type: ignore[arg-type]
    return None


def _cut_along(rewriter: Rewriter, value: Value, found: RowUpdates, i: int) -> Value:
    """An update of each row, or its place."""
    if found.count == 1:
        return value
    start, stop = [0] * len(found.sizes), list(found.sizes)
    start[found.axis], stop[found.axis] = i, i + 1
    return rewriter.add(shape.slice_, value, start=tuple(start), stop=tuple(stop), step=(1,) * len(start))


def _compare_places(rewriter: Rewriter, place: Value, found: RowUpdates) -> Value:
    """Whether an element of a row is at the place of the row's update."""
    dtype = int32 if found.source[found.axis] < 1 << 31 else int64
    place = rewriter.add(basic.cast, place, dtype=dtype)
    along = rewriter.add(shape.iota, shape=found.source, axis=found.axis - len(found.source), dtype=dtype)
    return rewriter.add(elementwise.equal, rewriter.add(basic.broadcast_to, place, shape=found.source), along)


def _add_updates(rewriter: Rewriter, x: Value, parts: Sequence[tuple[Value, Value]], found: RowUpdates) -> Value:
    """`x` and the sum of its updates; what has none, or only zeros, stays as it is, -0 too."""
    type = get_tensor_type(x)
    total = None
    for place, part in parts:
        wide = rewriter.add(basic.cast, part, dtype=type.accumulate)
        zero = rewriter.add(basic.full, shape=found.source, value=0, dtype=type.accumulate)
        spread = rewriter.add(basic.broadcast_to, wide, shape=found.source)
        chosen = rewriter.add(elementwise.where, _compare_places(rewriter, place, found), spread, zero)
        total = chosen if total is None else rewriter.add(elementwise.add, total, chosen)
    assert total is not None
    total = rewriter.add(basic.cast, total, dtype=type.dtype)
    if not type.dtype.is_float:
        return rewriter.add(elementwise.add, x, total)
    zero = rewriter.add(basic.full, shape=found.source, value=0, dtype=type.dtype)
    return rewriter.add(
        elementwise.where, rewriter.add(elementwise.equal, total, zero), x, rewriter.add(elementwise.add, x, total)
    )
