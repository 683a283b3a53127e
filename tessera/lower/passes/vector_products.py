"""Vector products: a matrix product with few rows or columns as a reduction of elementwise products.

Such a product reads each element of the matrix once or a few times: it is bound by memory, and packing a matrix for a
product of blocks would cost more than the product.
"""

from __future__ import annotations

from tessera.core.types import TensorType
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.ops.tensor import basic, contractions, elementwise, reduce, shape


def form_vector_products(function: Function, most: int, across: int | None = None) -> Function:
    """Rewrite products of at most `most` rows or columns.

    Sums that run across the rows of a matrix in memory have at most `across` results for each of its batch (None: any).
    """
    patterns, uses = RewritePatterns("vector products", same_types=True), UseDef(function)

    @patterns(contractions.dot)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        *_, m, k = get_shape(args[0])
        n = get_shape(args[1])[-1]
        if not all(isinstance(size, int) for size in (m, n, k)) or min(m, n) > most or k < 2:
            return None
        matrix, results, turned = (node.args[1], n, True) if m < n else (node.args[0], m, False)
        if across is not None and results > across and _is_turned(uses, matrix) is not turned:
            return None
        return _reduce_products(rewriter, node, args) if _has_plain_floats(node, args) else None

    return rewrite_function(function, patterns, remove_dead=True) if most else function


def _is_turned(uses: UseDef, value: Value) -> bool:
    """Whether a matrix is the transpose of what is in memory."""
    node = uses.get(value)
    if node is not None and node.op in (shape.reshape, basic.broadcast_to, basic.cast):
        return _is_turned(uses, node.args[0])
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
