"""Rewrites of matrix products: turned operands, operands that are equal along an axis, and vector products, which are
reductions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.types import DType, TensorType
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.ir.rules import REGISTRY
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.lower.passes.canonicalisation import canonicalisation
from tessera.ops.tensor import basic, contractions, elementwise, reduce, shape
from tessera.ops.tensor.coercion import is_narrow

turned_products = RewritePatterns("turned products", same_types=True)


def turn_products(function: Function) -> Function:
    """Products whose results alone are turned as products of their turned operands, of which one was turned before."""
    return rewrite_function(function, turned_products, remove_dead=True)


@turned_products(shape.permute)
def _(rewriter, node, args):
    product = rewriter.find_producer(args[0], contractions.dot)
    if product is None or rewriter.uses.count_uses(node.args[0]) > 1 or not _turns_matrices(node):
        return None
    left, right = product.args
    turned = [n for v in (left, right) if (n := rewriter.find_producer(v, shape.permute)) and _turns_matrices(n)]
    small = any(v.type.dtype.bits < 16 for v in (left, right))  # a target may read these along the contraction alone
    if not turned or small or any(v.type.policy is not None for v in (left, right, product.out)):
        return None
    return rewriter.add(contractions.dot, _turn(rewriter, right), _turn(rewriter, left), dtype=product.attrs["dtype"])


def _turns_matrices(node: Node) -> bool:
    """Whether a permutation exchanges the last two axes."""
    axes = list(node.attrs["axes"])
    return len(axes) > 1 and axes == [*range(len(axes) - 2), len(axes) - 1, len(axes) - 2]


def _turn(rewriter: Rewriter, value: Value) -> Value:
    """A matrix, or a batch of them, turned."""
    node, rank = rewriter.find_producer(value, shape.permute), value.type.rank  # type: ignore[union-attr]
    if node is not None and _turns_matrices(node):
        return node.args[0]
    return rewriter.add(shape.permute, value, axes=(*range(rank - 2), rank - 1, rank - 2))


uniform_operands = RewritePatterns("uniform operands", same_types=True)
POINTWISE = tuple(o for o in REGISTRY.values() if o.pointwise and o is not basic.cast)
UNIFORM_DEPTH = 6  # ops between a broadcast and the product


def multiply_once(function: Function) -> Function:
    """Products with rows or columns that are all equal as one row or column, which is broadcast.

    The gradient of a sum is such an operand.
    """
    return rewrite_function(function, uniform_operands, remove_dead=True)


@uniform_operands(contractions.dot)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    found = [
        _narrow_axis(rewriter, x, x.type.rank + axis, UNIFORM_DEPTH) for x, axis in zip(args, (-2, -1), strict=True)
    ]
    if found == [None, None] or _rounds_apart(node.out):
        return None
    operands = [x if one is None else one for x, one in zip(args, found, strict=True)]
    product = rewriter.add(contractions.dot, *operands, **node.attrs)
    return rewriter.add(basic.broadcast_to, product, shape=node.out.type.shape)


def _rounds_apart(value: Value) -> bool:
    """Whether equal numbers become different elements of a value, which draws how it rounds each."""
    policy = get_tensor_type(value).policy
    return policy is not None and policy.rounding == "stochastic"


def _narrow_axis(rewriter: Rewriter, value: Value, axis: int, depth: int) -> Value | None:
    """A value with one element along an axis of several, where all of them are equal; else None."""
    if value.type.shape[axis] == 1 or depth == 0 or _rounds_apart(value):
        return None
    node = rewriter.find_producer(value, basic.full, basic.broadcast_to, shape.permute, basic.cast, *POINTWISE)
    if node is None:
        return None
    if node.op is basic.full:
        return rewriter.add(basic.full, **{**node.attrs, "shape": _set_one(value.type.shape, axis)})
    if node.op is basic.broadcast_to:
        return _narrow_broadcast(rewriter, node, axis)
    axes = node.attrs["axes"] if node.op is shape.permute else range(value.type.rank)
    parts = [_narrow_axis(rewriter, x, axes[axis], depth - 1) for x in node.args]
    return None if None in parts else rewriter.add(node.op, *parts, **node.attrs)  # type: ignore[arg-type]


def _narrow_broadcast(rewriter: Rewriter, node: Node, axis: int) -> Value | None:
    source, shape_ = node.args[0], node.out.type.shape
    own = axis - len(shape_) + source.type.rank
    if own >= 0 and source.type.shape[own] != 1:
        return None
    return rewriter.add(basic.broadcast_to, source, shape=_set_one(shape_, axis))


def _set_one(sizes: Sequence[Any], axis: int) -> tuple[Any, ...]:
    return (*sizes[:axis], 1, *sizes[axis + 1 :])


early_rounding = RewritePatterns("early rounding", same_types=True)
EXACT_CLAUSES = {"compute", "accumulate"}  # of a policy: a cast to such a type of the same storage rounds nothing


def round_windows_early(function: Function) -> Function:
    """Products of windows that are rounded as products of windows of the rounded image, which has fewer elements."""
    return rewrite_function(function, early_rounding, remove_dead=True)


@early_rounding(contractions.dot)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    """The elements are widened again, as those of a convolution of 16 bits are, to the type of its result."""
    out = node.attrs["dtype"]
    found = [_round_early(rewriter, x, out) if isinstance(out, DType) else None for x in args]
    if found == [None, None]:
        return None
    operands = [_widen(rewriter, x, out) if early is None else early for x, early in zip(args, found, strict=True)]
    return rewriter.add(contractions.dot, *operands, **node.attrs)


def _round_early(rewriter: Rewriter, value: Value, out: DType) -> Value | None:
    """A value that is rounded after its elements were moved and repeated: rounded before that, then of type `out`."""
    narrow = get_tensor_type(value).dtype
    moved: dict[Value, Node] = {}
    leaves: dict[Value, None] = {}
    if not narrow.is_float or not _list_movements(rewriter, value, narrow, moved, leaves) or len(leaves) > 1:
        return None
    (source,) = leaves
    wide = get_tensor_type(source).dtype
    repeats = any(n.op in (shape.concatenate, basic.broadcast_to) for n in moved.values())
    if not repeats or not wide.is_float or wide.bits <= narrow.bits:
        return None
    rounded = rewriter.add(basic.cast, source, dtype=narrow)
    rounded = rounded if out == narrow else rewriter.add(basic.cast, rounded, dtype=out)
    return _move_rounded(rewriter, value, moved, {source: rounded})


def _list_movements(
    rewriter: Rewriter, value: Value, narrow: DType, moved: dict[Value, Node], leaves: dict[Value, None]
) -> bool:
    """The nodes that move a value's elements, and what they move; whether rounding to `narrow` commutes with them."""
    node = rewriter.find_producer(value, *MOVEMENTS, basic.cast)
    type = get_tensor_type(value)
    rounds = node is not None and node.op is basic.cast and get_tensor_type(node.args[0]).dtype != type.dtype
    if node is None or (rounds and type.dtype != narrow):  # it rounds a second time
        leaves[value] = None
        return True
    if value in moved:
        return True
    moved[value] = node
    exact = type.policy is None or set(type.policy.clauses()) <= EXACT_CLAUSES
    if not exact or node.attrs.get("value", 0) != 0:
        return False
    return all(_list_movements(rewriter, x, narrow, moved, leaves) for x in node.args)


def _move_rounded(rewriter: Rewriter, value: Value, moved: Mapping[Value, Node], made: dict[Value, Value]) -> Value:
    """The movements of a value, of rounded elements."""
    if value not in made:
        node = moved[value]
        parts = [_move_rounded(rewriter, x, moved, made) for x in node.args]
        made[value] = parts[0] if node.op is basic.cast else rewriter.add(node.op, *parts, **node.attrs)
    return made[value]


def form_vector_products(function: Function, most: int, across: int | None = None) -> Function:
    """Rewrite products of at most `most` rows or columns, and outer products, which are element-wise.

    Sums that run across the rows of a matrix in memory have at most `across` results for each of its batch (None: any).
    """
    patterns, uses = RewritePatterns("vector products", same_types=True), UseDef(function)

    @patterns(contractions.dot)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        *_, m, k = get_shape(args[0])
        n = get_shape(args[1])[-1]
        if not all(isinstance(size, int) for size in (m, n, k)) or not _has_plain_floats(node, args):
            return None
        if k == 1:
            return _multiply_outer(rewriter, node, args)
        if min(m, n) > most:
            return None
        matrix, results, turned = (node.args[1], n, True) if m < n else (node.args[0], m, False)
        if (total := _sum_elements(rewriter, node, args)) is not None:
            return total
        if across is not None and results > across and is_turned(uses, matrix) is not turned:
            return None
        return _reduce_products(rewriter, node, args)

    return rewrite_function(function, patterns, remove_dead=True) if most else function


def _multiply_outer(rewriter: Rewriter, node: Node, args: list[Value]) -> Value:
    """The outer product of a column and a row."""
    type = get_tensor_type(node.out)
    sides = [_widen(rewriter, x, get_tensor_type(x).accumulate) for x in args]
    out = rewriter.add(elementwise.mul, *(rewriter.add(basic.broadcast_to, x, shape=type.shape) for x in sides))
    return _widen(rewriter, out, type.dtype)


def is_turned(uses: UseDef, value: Value) -> bool:
    """Whether a matrix is the transpose of what is in memory."""
    node = uses.get(value)
    if node is not None and node.op in (shape.reshape, basic.broadcast_to, basic.cast):
        return is_turned(uses, node.args[0])
    return (
        node is not None
        and node.op is shape.permute
        and node.attrs["axes"][-1] % len(get_shape(value)) != len(get_shape(value)) - 1
    )


def _has_plain_floats(node: Node, args: list[Value]) -> bool:
    types = [get_tensor_type(v) for v in args]
    return all(t.policy is None and t.dtype.is_float and t.dtype.bits >= 16 for t in types) and (
        types[0].dtype == types[1].dtype and get_tensor_type(node.out).policy is None
    )


def _sum_elements(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    """A matrix times a vector of equal numbers: the sums of its rows or columns, as they are in memory."""
    vectors = [(side, rewriter.find_producer(x, basic.full)) for side, x in enumerate(args)]
    side, same = next(((s, n) for s, n in vectors if n and get_shape(args[s])[-2 + s] == 1), (0, None))
    if same is None:
        return None
    wide, matrix, axis = get_tensor_type(args[0]).accumulate, args[1 - side], -1 if side else -2
    turned = rewriter.find_producer(matrix, shape.permute)
    if turned is not None and _turns_matrices(turned):
        matrix, axis = turned.args[0], -3 - axis
    value = _widen(rewriter, matrix, wide)
    factor = float(np.asarray(same.attrs["value"], get_tensor_type(same.out).dtype.numpy))
    if factor != 1:
        other = rewriter.add(basic.full, shape=get_shape(value), value=factor, dtype=wide)
        value = rewriter.add(elementwise.mul, value, other)
    total = rewriter.add(reduce.sum, value, axis=(axis,), keepdims=False)
    total = rewriter.add(shape.reshape, total, shape=get_shape(node.out))
    out = get_tensor_type(node.out).dtype
    return total if out == wide else rewriter.add(basic.cast, total, dtype=out)


def _reduce_products(rewriter: Rewriter, node: Node, args: list[Value]) -> Value:
    """The sum over k of left[…, m, k, 1] · right[…, 1, k, n]; where there are few columns, over the last axis."""
    (*batch, m, k), n = get_shape(args[0]), get_shape(args[1])[-1]
    rank, wide = len(batch), get_tensor_type(args[0]).accumulate
    left, right = (_widen(rewriter, v, wide) for v in args)
    if n <= m:  # [m, 1, k] · [1, n, k]
        right = rewriter.add(shape.permute, right, axes=(*range(rank), rank + 1, rank))
        whole, axis = (*batch, m, n, k), -1
        sides = (*batch, m, 1, k), (*batch, 1, n, k)
    else:
        whole, axis = (*batch, m, k, n), -2
        sides = (*batch, m, k, 1), (*batch, 1, k, n)
    factors = []
    for value, side in zip((left, right), sides, strict=True):
        value = rewriter.add(shape.reshape, value, shape=side)
        factors.append(value if side == whole else rewriter.add(basic.broadcast_to, value, shape=whole))
    product = rewriter.add(elementwise.mul, *factors)
    out = rewriter.add(reduce.sum, product, axis=(axis,), keepdims=False)
    type = node.out.type
    assert isinstance(type, TensorType)
    return out if type.dtype == wide else rewriter.add(basic.cast, out, dtype=type.dtype)


def _widen(rewriter: Rewriter, value: Value, wide: object) -> Value:
    return value if get_tensor_type(value).dtype == wide else rewriter.add(basic.cast, value, dtype=wide)


narrow_products = RewritePatterns("narrow products", same_types=True)
MOVEMENTS = (shape.permute, shape.reshape, shape.slice_, shape.pad, shape.concatenate, basic.broadcast_to)


def narrow_dots(function: Function) -> Function:
    """Multiply the operands of products as memory holds them, where the function widens them first."""
    return rewrite_function(function, narrow_products, remove_dead=True)


@canonicalisation(contractions.dot)
@narrow_products(contractions.dot)
def _(rewriter, node, args):
    """A product of widened operands is the product of the narrow ones, accumulated in the wide type."""
    if node.attrs["dtype"] != args[0].type.accumulate:
        return None
    narrow = [_find_narrow_source(rewriter, a) for a in args]
    if any(x is None for x in narrow) or narrow[0].type.dtype != narrow[1].type.dtype:
        return None
    return rewriter.add(contractions.dot, *narrow, dtype=node.attrs["dtype"])


def _find_narrow_source(rewriter: Rewriter, value: Value) -> Value | None:
    """The elements of a value before they were widened to the type in which products of them accumulate."""
    cast = rewriter.find_producer(value, basic.cast)
    if cast is not None:
        source, wide = _find_element_type(cast.args[0]), _find_element_type(value)
        exact = is_narrow(source) and source.compute == source.accumulate == wide.dtype
        return cast.args[0] if exact and source.policy is None is wide.policy else None
    node = rewriter.find_producer(value, *MOVEMENTS)
    if node is None or node.attrs.get("value", 0) != 0:  # zero is a number of every type
        return None
    found = [_find_narrow_source(rewriter, a) for a in node.args]
    parts = [x for x in found if x is not None]
    if len(parts) < len(found) or len({_find_element_type(x).dtype for x in parts}) > 1:
        return None
    return rewriter.add(node.op, *parts, **node.attrs)


def _find_element_type(value: Value) -> TensorType:
    return get_tensor_type(value).with_shape(())
