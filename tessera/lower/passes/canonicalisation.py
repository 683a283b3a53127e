"""Canonicalisation: exact rewrites of Graph functions, as a table of patterns by op."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tessera.core.symbolic_dim import Dim
from tessera.core.types import TensorType
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, eliminate_common_subexpressions, rewrite_function
from tessera.ir.rules import REGISTRY, Op
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.ops.tensor import attention, basic, contractions, elementwise, reduce, shape
from tessera.ops.tensor.coercion import is_narrow
from tessera.ops.tensor.scatter import scatter_add

canonicalisation = RewritePatterns("canonicalisation", same_types=True)


def canonicalise(function: Function) -> Function:
    """Apply every canonicalisation pattern, in one walk."""
    return rewrite_function(function, canonicalisation)


def get_splat_number(rewriter: Rewriter, value: Value) -> Any:
    """The number that every element of a tensor equals, where a `full` says so; else None."""
    node = rewriter.find_producer(value, basic.full, basic.cast)
    if node is not None and node.op is basic.cast:  # made by make_splat
        same = node.args[0].type.dtype == value.type.dtype
        node = rewriter.find_producer(node.args[0], basic.full) if same else None
    return None if node is None else node.attrs["value"]


def make_splat(rewriter: Rewriter, like: Value, number: Any) -> Value:
    """A tensor of the type of another, each element of which is one number; a cast adds the policy, if any."""
    splat = rewriter.add(basic.full, shape=like.type.shape, value=number, dtype=like.type.dtype)
    return splat if like.type.policy is None else rewriter.add(basic.cast, splat, dtype=like.type.policy)


def make_reshape(rewriter: Rewriter, value: Value, to: Sequence[Any]) -> Value:
    """A tensor with another shape; a reshape of a reshape is one reshape."""
    inner = rewriter.find_producer(value, shape.reshape)
    value = inner.args[0] if inner else value
    return value if value.type.shape == tuple(to) else rewriter.add(shape.reshape, value, shape=tuple(to))


def _move_splat(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    """An op that only moves elements gives a splat for a splat."""
    value = get_splat_number(rewriter, args[0])
    return None if value is None else make_splat(rewriter, node.out, value)


@canonicalisation(basic.dim_value)
def _(rewriter, node, args):
    size = node.attrs["size"]
    return None if isinstance(size, Dim) else make_splat(rewriter, node.out, size)


@canonicalisation(basic.cast)
def _(rewriter, node, args):
    if args[0].type == node.out.type:
        return args[0]
    out = _get_element_type(node.out)
    wide = _find_widening(rewriter, args[0], 0)
    if wide and out.dtype.is_float and out.policy is None:  # what was widened is rounded as it was before
        same = out == _get_element_type(wide.args[0])
        return wide.args[0] if same else rewriter.add(basic.cast, wide.args[0], dtype=node.attrs["dtype"])
    if _get_element_type(args[0]).dtype.bits > out.dtype.bits:
        # Random rounding goes by the place of an element, which a reshape keeps.
        moves = (shape.reshape, shape.permute, basic.fusion_barrier) if out.policy is None else (shape.reshape,)
        narrow = _narrow_moved(rewriter, args[0], node.attrs, moves)
        if narrow is not None:
            return narrow
    inner = rewriter.find_producer(args[0], elementwise.neg)
    if inner and _rounds_symmetrically(_get_element_type(args[0]), _get_element_type(node.out)):
        return rewriter.add(elementwise.neg, rewriter.add(basic.cast, inner.args[0], dtype=node.attrs["dtype"]))
    value = get_splat_number(rewriter, args[0])
    if value is None:
        return None
    return make_splat(rewriter, node.out, _fold_constants(node, [_get_splat_array(rewriter, args[0])]))


def _narrow_moved(rewriter: Rewriter, value: Value, attrs: Mapping[str, Any], moves: Sequence[Op]) -> Value | None:
    """The cast of what is moved to a narrower type, moved as it was; None where nothing is.

    A product keeps its own shape up to its result, where a reshape costs nothing; fewer bytes are moved.
    """
    moved = rewriter.find_producer(value, *moves)
    if moved is None:
        return None
    inner = _narrow_moved(rewriter, moved.args[0], attrs, moves)
    return rewriter.add(moved.op, inner or rewriter.add(basic.cast, moved.args[0], **attrs), **moved.attrs)


def _rounds_symmetrically(source: TensorType, out: TensorType) -> bool:
    """Whether the cast of -x is that of x, negated: one cast then serves both. Types of 6 bits make +0 of a NaN."""
    return source.dtype.is_float and out.dtype.is_float and out.dtype.bits >= 8 and source.policy is None is out.policy


@canonicalisation(shape.reshape)
def _(rewriter, node, args):
    if wide := _find_widening(rewriter, args[0], 0):  # a reshape of memory costs nothing
        inner = make_reshape(rewriter, wide.args[0], node.attrs["shape"])
        return rewriter.add(basic.cast, inner, dtype=wide.attrs["dtype"])
    return _move_splat(rewriter, node, args) or make_reshape(rewriter, args[0], node.attrs["shape"])


@canonicalisation(basic.broadcast_to)
def _(rewriter, node, args):
    if args[0].type.shape == node.out.type.shape:
        return args[0]
    inner = rewriter.find_producer(args[0], basic.broadcast_to)
    if inner:
        return rewriter.add(basic.broadcast_to, inner.args[0], shape=node.attrs["shape"])
    return _move_splat(rewriter, node, args)


@canonicalisation(shape.permute)
def _(rewriter, node, args):
    x, axes = args[0], list(node.attrs["axes"])
    inner = rewriter.find_producer(x, shape.permute)
    if inner:
        x, axes = inner.args[0], [inner.attrs["axes"][a] for a in axes]
    moved = [a for a in axes if x.type.shape[a] != 1]
    if moved == sorted(moved):  # only axes of size 1 move
        return make_reshape(rewriter, x, node.out.type.shape)
    return _move_splat(rewriter, node, args) or (rewriter.add(shape.permute, x, axes=tuple(axes)) if inner else None)


@canonicalisation(attention.scaled_dot_product_attention)
def _(rewriter, node, args):
    """Attention on operands with permuted head axes becomes attention on the operands, and one permutation."""
    permuted = [rewriter.find_producer(x, shape.permute) for x in args[:3]]
    if not all(each and each.attrs["axes"] == attention.HEADS_SECOND_ORDER for each in permuted):
        return None
    found = rewriter.add(attention.positional_attention, *(each.args[0] for each in permuted), *args[3:], **node.attrs)
    return rewriter.add(shape.permute, found, axes=attention.HEADS_SECOND_ORDER)


@canonicalisation(shape.slice_)
def _(rewriter, node, args):
    if args[0].type == node.out.type:
        return args[0]
    return (
        _move_splat(rewriter, node, args)
        or _cut_repeats(rewriter, node, args[0])
        or _take_part(rewriter, node, args[0])
    )


def _cut_repeats(rewriter: Rewriter, node: Node, x: Value) -> Value | None:
    """A slice of a broadcast along the axes that repeat, as a broadcast to fewer elements."""
    repeated = rewriter.find_producer(x, basic.broadcast_to)
    if repeated is None:
        return None
    source, before, after = repeated.args[0], x.type.shape, node.out.type.shape  # type: ignore[union-attr]
    sizes = (1,) * (len(before) - source.type.rank) + tuple(source.type.shape)  # type: ignore[union-attr]
    if any(n != m and held != 1 for n, m, held in zip(before, after, sizes, strict=True)):
        return None
    same = source.type.shape == after  # type: ignore[union-attr]
    return source if same else rewriter.add(basic.broadcast_to, source, shape=after)


def _take_part(rewriter: Rewriter, node: Node, x: Value) -> Value | None:
    """A slice of one part of what is computed from stacks, as that part."""
    cut = [a for a, (n, m) in enumerate(zip(x.type.shape, node.out.type.shape, strict=True)) if n != m]  # type: ignore[union-attr]
    if len(cut) != 1 or node.out.type.shape[cut[0]] != 1:  # type: ignore[union-attr]
        return None
    parts = PartFinder(rewriter, cut[0] - x.type.rank)  # type: ignore[union-attr]
    return parts.take(x, int(node.attrs["start"][cut[0]])) if parts.is_stacked(x) else None


@canonicalisation(shape.pad)
def _(rewriter, node, args):
    if 0 in args[0].type.shape:  # all of it is padding
        return make_splat(rewriter, node.out, node.attrs["value"])
    if args[0].type == node.out.type:
        return args[0]
    moved = rewriter.find_producer(args[0], shape.permute) or _find_widening(rewriter, args[0], node.attrs["value"])
    return _pad_source(rewriter, args[0], node.attrs) if moved else None


def _pad_source(rewriter: Rewriter, x: Value, attrs: Mapping[str, Any]) -> Value:
    """The padding of a tensor that is permuted or widened as a padded tensor that is: memory keeps the order of the
    source and its narrow elements."""
    if turned := rewriter.find_producer(x, shape.permute):
        axes = turned.attrs["axes"]
        places = [axes.index(a) for a in range(len(axes))]
        sides = {name: tuple(attrs[name][i] for i in places) for name in ("low", "high")}
        inner = _pad_source(rewriter, turned.args[0], {**attrs, **sides})
        return rewriter.add(shape.permute, inner, axes=axes)
    if wide := _find_widening(rewriter, x, attrs["value"]):
        return rewriter.add(basic.cast, _pad_source(rewriter, wide.args[0], attrs), dtype=wide.attrs["dtype"])
    return rewriter.add(shape.pad, x, **attrs)


def _find_widening(rewriter: Rewriter, x: Value, number: Any) -> Node | None:
    """The cast of floats of 16 bits that makes a value, if a number that pads it is one of both types."""
    cast = rewriter.find_producer(x, basic.cast)
    if cast is None or (number != 0 and math.isfinite(number)):
        return None
    source, wide = _get_element_type(cast.args[0]), _get_element_type(x)
    narrow = source.dtype.is_float and wide.dtype.is_float and 16 <= source.dtype.bits < wide.dtype.bits
    return cast if narrow and source.policy is None is wide.policy else None


@canonicalisation(scatter_add)
def _(rewriter, node, args):
    """Indices are checked before a library kernel may take them; its lowering finds them checked."""
    x, indices, updates = args
    if rewriter.find_producer(indices, shape.check_index):
        return None
    at = node.attrs["axis"] + x.type.rank
    known = {"size": x.type.shape[at], "along": at, "what": "index", "wrap": indices.type.dtype.kind == "int"}
    checked = rewriter.add(shape.check_index, indices, **known)
    return rewriter.add(scatter_add, x, checked, updates, **node.attrs)


@canonicalisation(shape.concatenate)
def _(rewriter, node, args):
    kept = [a for a in args if 0 not in a.type.shape]
    if len(kept) == len(args) > 1 or not kept:
        return None
    return kept[0] if len(kept) == 1 else rewriter.add(shape.concatenate, *kept, axis=node.attrs["axis"])


# Concatenations of many parts.

MAX_PARTS = 16  # of a concatenation: a kernel chooses between them for each element, and holds them in registers
wide_concatenations = RewritePatterns("wide concatenations", same_types=True)


@wide_concatenations(shape.concatenate)
def _(rewriter, node, args):
    """A tree of concatenations: the results of an unrolled loop are stacked in two kernels, or in three."""
    if len(args) <= MAX_PARTS:
        return None
    while len(args) > 1:
        groups = [args[i : i + MAX_PARTS] for i in range(0, len(args), MAX_PARTS)]
        args = [g[0] if len(g) == 1 else rewriter.add(shape.concatenate, *g, axis=node.attrs["axis"]) for g in groups]
    return args[0]


def split_concatenations(function: Function) -> Function:
    """A Graph function without concatenations of many parts."""
    return rewrite_function(function, wide_concatenations)


@canonicalisation(elementwise.where)
def _(rewriter, node, args):
    chosen = get_splat_number(rewriter, args[0])
    return None if chosen is None else args[1 if chosen else 2]


def _get_splat_array(rewriter: Rewriter, value: Value) -> np.ndarray | None:
    number = get_splat_number(rewriter, value)
    return None if number is None else basic.full.ref(shape=(), value=number, dtype=value.type.dtype)


def _get_element_type(value: Value) -> TensorType:
    assert isinstance(value.type, TensorType)
    return value.type.with_shape(())


def _fold_constants(node: Node, arrays: Sequence[Any]) -> Any:
    """Constant folding: the result of a pointwise node on numbers."""
    types = tuple(_get_element_type(v) for v in node.args)
    (out,) = node.op.execute(types, (_get_element_type(node.out),), node.attrs, list(arrays))
    return out.item() if not node.out.type.dtype.is_float else float(out)


@canonicalisation(*(o for o in REGISTRY.values() if o.pointwise and o not in (basic.cast, elementwise.where)))
def _(rewriter, node, args):
    if 0 in node.out.type.shape:  # no element is computed: an index that is no element cannot be outside
        return make_splat(rewriter, node.out, 0)
    if all(get_splat_number(rewriter, a) is not None for a in args):
        return make_splat(rewriter, node.out, _fold_constants(node, [_get_splat_array(rewriter, a) for a in args]))
    unit = _IDENTITIES.get(node.op)
    type = get_tensor_type(node.out)
    if type.policy is not None and type.compute != type.dtype:  # the operand is rounded to the type of the computation
        return None
    number = None if unit is None else _get_splat_array(rewriter, args[1])
    if number is None:
        return None
    if node.op is elementwise.pow and number == 2:
        return rewriter.add(elementwise.mul, args[0], args[0])  # rounded once, as the power is
    return args[0] if float(number) == unit and math.copysign(1.0, number) > 0 else None


# x * 1, x / 1, x ** 1 and x - 0 are exactly x, with its sign and NaN payload; x + 0 is not, for -0.
_IDENTITIES: dict[Op, float] = {elementwise.mul: 1.0, elementwise.div: 1.0, elementwise.pow: 1.0, elementwise.sub: 0.0}


@canonicalisation(contractions.dot)
def _(rewriter, node, args):
    return make_splat(rewriter, node.out, 0) if args[0].type.shape[-1] == 0 else None


def sink_widening(function: Function) -> Function:
    """Code sinking: each cast to a wider type is directly before its first use; registers then hold narrow values."""
    waiting: dict[Value, Node] = {}
    nodes: list[Node] = []
    for node in function.body.nodes:
        if node.op is basic.cast and is_narrow(_get_element_type(node.args[0])):
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


@canonicalisation(reduce.argmax, reduce.argmin)
def _(rewriter, node, args):
    return make_splat(rewriter, node.out, 0) if args[0].type.shape[node.attrs["axis"]] == 1 else None


@canonicalisation(reduce.sum, reduce.max, reduce.min)
def _(rewriter, node, args):
    (x,), axes = args, [a + args[0].type.rank for a in node.attrs["axis"]]
    sizes = x.type.shape
    if node.op is reduce.sum and any(sizes[a] == 0 for a in axes):
        return make_splat(rewriter, node.out, 0)
    if (joined := _join_reductions(rewriter, node, x, axes)) is not None:
        return joined
    many = [a for a in axes if sizes[a] != 1]
    alone = len(many) > 1 or not node.attrs["keepdims"]  # else it is one of a kernel, as of a norm, that keeps the axes
    if many and alone and (order := _find_memory_order(rewriter, x)) is not None:
        return _reduce_in_order(rewriter, node, x, many, order)
    if not many:
        same = make_reshape(rewriter, x, node.out.type.shape)
        dtype = node.out.type.dtype
        same = same if same.type.dtype == dtype else rewriter.add(basic.cast, same, dtype=dtype)
        if node.op is not reduce.sum or not axes or not dtype.is_float or _is_sum(rewriter, same):
            return same
        return rewriter.add(elementwise.add, same, make_splat(rewriter, node.out, 0))  # a sum starts at +0: -0 is +0
    if len(axes) == 1:
        return _combine_slices(rewriter, node, x, axes[0])
    return make_reshape(rewriter, _reduce_one_axis(rewriter, node, x, many), node.out.type.shape)


def _is_sum(rewriter: Rewriter, x: Value) -> bool:
    """Whether a value is a sum, which is never -0."""
    view = rewriter.find_producer(x, shape.reshape)
    return rewriter.find_producer(view.args[0] if view else x, reduce.sum) is not None


MAX_JOINED = 64  # elements of a result whose axes were reduced one after the other


def _join_reductions(rewriter: Rewriter, node: Node, x: Value, axes: Sequence[int]) -> Value | None:
    """A reduction of few elements that reduces another one's results, reshaped or not, as one of all axes."""
    view = rewriter.find_producer(x, shape.reshape)
    inner = rewriter.find_producer(view.args[0] if view else x, node.op)
    before = rewriter.uses.find(node.args[0], shape.reshape) if view else None
    read = [node.args[0], *(before.args if before else ())]
    if inner is None or any(rewriter.uses.count_uses(v) > 1 for v in read):
        return None
    (source,) = inner.args
    if view is not None:  # rows that are reduced stay rows
        if inner.attrs["axis"] != (-1,) or inner.attrs["keepdims"]:
            return None
        source = make_reshape(rewriter, source, (*get_shape(x), get_shape(source)[-1]))
    type, out = get_tensor_type(source), get_tensor_type(node.out)
    first = [a + type.rank for a in inner.attrs["axis"]]
    kept = [a for a in range(type.rank) if a not in first or inner.attrs["keepdims"]]
    both = sorted({*first, *(kept[a] for a in axes)})
    sizes = [n for a in both if isinstance(n := type.shape[a], int)]
    few = len(sizes) == len(both) and 0 < math.prod(sizes) <= MAX_JOINED
    rounds = node.op is reduce.sum and (type.accumulate != type.dtype or out.dtype != type.dtype)
    if not few or rounds or type.policy is not None or len(both) == len(first):
        return None
    many = [a for a in both if type.shape[a] != 1]
    return make_reshape(rewriter, _reduce_axes(rewriter, node, source, many), out.shape) if many else None


COMBINERS = {reduce.sum: elementwise.add, reduce.max: elementwise.maximum, reduce.min: elementwise.minimum}
MAX_COMBINED = 128  # slices that are combined element by element


def _combine_slices(rewriter: Rewriter, node: Node, x: Value, axis: int) -> Value | None:
    """A reduction of what is computed from slices stacked along its axis (a pool's windows) as a binary tree of its
    parts: the stack then needs no memory."""
    found, count = PartFinder(rewriter, axis - x.type.rank), x.type.shape[axis]  # type: ignore[union-attr]
    if isinstance(count, Dim) or not 1 < count <= MAX_COMBINED or not found.is_stacked(x):
        return None
    out = node.out.type
    if out.policy is not None:  # type: ignore[union-attr]
        return None
    wide = x.type.accumulate if node.op is reduce.sum and out.dtype.is_float else out.dtype  # type: ignore[union-attr]
    slices = [make_reshape(rewriter, found.take(x, place), out.shape) for place in range(count)]  # type: ignore[union-attr]
    parts = [v if v.type.dtype == wide else rewriter.add(basic.cast, v, dtype=wide) for v in slices]  # type: ignore[union-attr]
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [rewriter.add(COMBINERS[node.op], *pair) for pair in pairs] + parts[len(parts) // 2 * 2 :]
    total = parts[0]
    if node.op is reduce.sum and wide.is_float:
        total = rewriter.add(elementwise.add, total, make_splat(rewriter, total, 0))  # a sum starts at +0: -0 is +0
    return total if wide == out.dtype else rewriter.add(basic.cast, total, dtype=out.dtype)


MAX_LIFTED = 8  # ops between a reduction and the permutations below it


def _find_memory_order(rewriter: Rewriter, x: Value, most: int = MAX_LIFTED) -> tuple[int, ...] | None:
    """The permutation of all that a value is computed from by slices and pointwise ops; None where there is no one."""
    node = rewriter.find_producer(x, *LIFTED)
    if node is None or most == 0:
        return None
    if node.op is shape.permute:
        return tuple(node.attrs["axes"])
    found = {_find_memory_order(rewriter, v, most - 1) for v in node.args if get_splat_number(rewriter, v) is None}
    return found.pop() if len(found) == 1 else None


LIFTED = (shape.permute, shape.slice_, *(o for o in REGISTRY.values() if o.pointwise and not o.effects))


def _reduce_in_order(rewriter: Rewriter, node: Node, x: Value, axes: Sequence[int], order: Sequence[int]) -> Value:
    """A reduction of what is computed from permuted tensors, in the order of axes in which memory holds them."""
    source, reduced = _undo_permutation(rewriter, x, order), sorted(order[a] for a in axes)
    kept = [a for a in range(len(order)) if a not in reduced]
    found = _reduce_axes(rewriter, node, source, reduced)
    after = [a for a in order if a in kept]
    if after != kept:
        found = rewriter.add(shape.permute, found, axes=tuple(kept.index(a) for a in after))
    return make_reshape(rewriter, found, node.out.type.shape)


def _reduce_axes(rewriter: Rewriter, node: Node, x: Value, axes: Sequence[int]) -> Value:
    if len(axes) > 1:
        return _reduce_one_axis(rewriter, node, x, list(axes))
    return rewriter.add(node.op, x, axis=(axes[0] - x.type.rank,), keepdims=False)  # type: ignore[union-attr]


def _undo_permutation(rewriter: Rewriter, x: Value, order: Sequence[int]) -> Value:
    """A value of which `_find_memory_order` gives the order, with its axes as they were before."""
    number = get_splat_number(rewriter, x)
    before = tuple(order.index(a) for a in range(len(order)))
    if number is not None:
        return make_splat(rewriter, rewriter.add(shape.permute, x, axes=before), number)
    node = rewriter.find_producer(x, *LIFTED)
    assert node is not None
    if node.op is shape.permute:
        return node.args[0]
    args = [_undo_permutation(rewriter, v, order) for v in node.args]
    attrs = dict(node.attrs)
    if node.op is shape.slice_:
        attrs |= {name: tuple(attrs[name][i] for i in before) for name in ("start", "stop", "step")}
    return rewriter.add(node.op, *args, **attrs)


def _reduce_one_axis(rewriter: Rewriter, node: Node, x: Value, axes: list[int]) -> Value:
    """A reduction of several axes, reshaped into one; its result has the shape of the other axes."""
    sizes, rank = x.type.shape, x.type.rank
    kept = [a for a in range(rank) if a not in axes]
    order = [*kept, *axes]
    together = axes == list(range(axes[0], axes[-1] + 1))
    if together:
        order = list(range(rank))
    elif order != sorted(order):
        x = rewriter.add(shape.permute, x, axes=tuple(order))
    first = axes[0] if together else len(kept)
    count = math.prod(sizes[a] for a in axes)
    after = [sizes[a] for a in order[first + len(axes) :]]
    flat = make_reshape(rewriter, x, (*(sizes[a] for a in order[:first]), count, *after))
    axis = first - flat.type.rank
    return rewriter.add(node.op, flat, axis=(axis,), keepdims=False)


# Parts of stacks: one part of what is computed from stacked tensors is computed from the parts of the stacks.
#
# A stack is a concatenation of tensors of size 1 along its axis, as the windows of a pool are. Where reductions of such
# a value combine its parts, and slices take them, the stack needs no memory, and kernels that read it no selections.


MAX_NODES = 16  # between a part and its stacks; more are computed once, for all parts


@dataclass
class PartFinder:
    """Computes the parts of values along an axis, which is counted from the end (negative)."""

    rewriter: Rewriter
    axis: int
    found: dict[tuple[Value, int], Value] = field(default_factory=dict)

    def is_stacked(self, value: Value) -> bool:
        """Whether a value is computed by elementwise ops from stacks along the axis, and from what does not change."""
        nodes: dict[Value, None] = {}
        return self._walk(value, nodes) and any(self._find_stack(v) is not None for v in nodes)

    def _walk(self, value: Value, nodes: dict[Value, None]) -> bool:
        if value in nodes:
            return True
        nodes[value] = None
        node = self._find(value)
        if node is None or value.type.policy is not None or len(nodes) > MAX_NODES:  # type: ignore[union-attr]
            return False
        if self._find_stack(value) is not None or self._is_spread(node) or node.op is basic.full:
            return True
        return node.op.pointwise and node.op is not shape.check_index and all(self._walk(v, nodes) for v in node.args)

    def _find(self, value: Value) -> Node | None:
        return self.rewriter.builder.producers.get(value)

    def _find_stack(self, value: Value) -> Node | None:
        """The concatenation that stacks a value along the axis."""
        node = self._find(value)
        if node is None or node.op is not shape.concatenate or self._from_end(node.attrs["axis"], value) != self.axis:
            return None
        return node if all(v.type.shape[self.axis] == 1 for v in node.args) else None  # type: ignore[union-attr]

    def _from_end(self, axis: int, value: Value) -> int:
        return axis if axis < 0 else axis - value.type.rank  # type: ignore[union-attr]

    def _is_spread(self, node: Node) -> bool:
        """Whether a value is the same all along the axis."""
        if node.op is not basic.broadcast_to:
            return False
        sizes = node.args[0].type.shape  # type: ignore[union-attr]
        return len(sizes) < -self.axis or sizes[self.axis] == 1

    def take(self, value: Value, place: int) -> Value:
        """The part of a stacked value at a place, of size 1 along the axis."""
        key = value, place
        if key not in self.found:
            self.found[key] = self._take(value, place)
        return self.found[key]

    def _take(self, value: Value, place: int) -> Value:
        node = self._find(value)
        assert node is not None, "a stacked value is computed"
        if (stack := self._find_stack(value)) is not None:
            return stack.args[place]
        sizes = list(value.type.shape)  # type: ignore[union-attr]
        sizes[self.axis] = 1
        if node.op in (basic.broadcast_to, basic.full):
            return self.rewriter.add(node.op, *node.args, **{**node.attrs, "shape": tuple(sizes)})
        return self.rewriter.add(node.op, *(self.take(v, place) for v in node.args), **node.attrs)


# Shared reductions: one of a value over the same axes that some uses keep and others drop. `x.mean(1)` beside
# `x - x.mean(1, keepdims=True)`, as in a variance that is returned with its mean, would read `x` twice: the nodes
# differ, so common subexpressions do not see them as one.


REDUCTIONS = (reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)


def share_reductions(function: Function) -> Function:
    """A reduction that differs from an earlier one in `keepdims` alone becomes a reshape of it."""
    first: dict[Hashable, Node] = {}
    earlier = {n: first.setdefault(_make_key(n), n) for n in function.body.nodes if n.op in REDUCTIONS}
    if len(earlier) == len(first):
        return function
    patterns = RewritePatterns("shared reductions", same_types=True)

    @patterns(*REDUCTIONS)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        same = earlier.get(node, node)
        return None if same is node else make_reshape(rewriter, rewriter.new(same.out), get_shape(node.out))

    return eliminate_common_subexpressions(rewrite_function(function, patterns, remove_dead=True))


def _make_key(node: Node) -> Hashable:
    """What reductions have in common that differ in `keepdims` alone."""
    rest = {name: value for name, value in node.attrs.items() if name != "keepdims"}
    return node.op, node.args, repr(rest), get_tensor_type(node.out).with_shape(())
