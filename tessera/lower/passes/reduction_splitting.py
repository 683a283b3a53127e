"""Reduction splitting (rfactor): long reductions with few results become partial results and their combination; vector
products: matrix products with few rows or columns become reductions.

A kernel gives each result to one program. Where that leaves most of a GPU idle, or lets a processor walk few columns
of long rows, the reduced axis is folded into parts of equal length, which programs reduce side by side, and a second
reduction combines the partial results. The tree depends on the sizes alone, so equal inputs give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.core.symbolic_dim import round_up, symbol_names
from tessera.core.types import TensorType
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.passes.canonicalisation import COMBINERS
from tessera.lower.schedule_to_tile.reductions import find_neutral_element
from tessera.ops.tensor import basic, contractions, elementwise, reduce, shape
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.rearrange import narrow
from tessera.ops.tensor.shape import pad, reshape

KINDS = {reduce.sum: "sum", reduce.max: "max", reduce.min: "min"}
MIN_SERIAL_ELEMENTS = 1 << 17  # a program that reduces fewer costs less than a second launch
MIN_PART_ELEMENTS = 1 << 14  # of a part
PART_MULTIPLE = 64  # a part that leaves a rest begins at a multiple of so many elements, for vector loads


@dataclass(frozen=True)
class AxisSplit:
    """An axis (from the end) in `parts` of `length` elements; `rest` elements follow them."""

    axis: int
    parts: int
    length: int
    rest: int


def split_reductions(function: Function, plan: LoweringPlan) -> Function:
    """Split the sums, maxima and minima that would leave most of the programs of a target without work."""
    if plan.reduction_parts is None and plan.parallel is None:
        return function
    patterns, uses = RewritePatterns("reduction splitting"), UseDef(function)

    @patterns(*COMBINERS)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value] | None:
        split = choose_split(node, plan)
        return (_reduce_in_parts(node, Tensor(args[0]), split, node.args[0] in uses).data,) if split else None

    return rewrite_function(function, patterns)


def choose_split(node: Node, plan: LoweringPlan) -> AxisSplit | None:
    """The split of a reduction, or None where it has programs enough, or little work for each."""
    type, axes = node.args[0].type, node.attrs["axis"]
    most = plan.reduction_parts or plan.parallel
    assert isinstance(type, TensorType) and most is not None
    if type.policy is not None or symbol_names(type.shape) or not axes or 0 in type.shape:
        return None
    sizes = [int(n) for n in type.shape]
    programs = _count_programs(sizes, axes, plan.result_lanes or plan.lanes)
    each = math.prod(sizes) // programs
    parts = min(most // programs, each // MIN_PART_ELEMENTS)
    axis = max(axes, key=lambda a: (sizes[a], -a))
    if each < MIN_SERIAL_ELEMENTS or parts < 2 or sizes[axis] < 2 * parts:
        return None
    return _divide_axis(axis, sizes[axis], parts)


def _count_programs(sizes: Sequence[int], axes: Sequence[int], lanes: int) -> int:
    """The programs of a reduction: one for each result, or for `lanes` of them along the contiguous axis."""
    rank = len(sizes)
    kept = [a for a in range(-rank, 0) if a not in axes]
    lane = next((a for a in range(-1, -rank - 1, -1) if sizes[a] > 1), -1)
    count = math.prod(sizes[a] for a in kept)
    return count if lane in axes else count // sizes[lane] * -(-sizes[lane] // lanes)


def _divide_axis(axis: int, size: int, parts: int) -> AxisSplit:
    """About so many parts of an axis: without a rest if a length near to that divides the size."""
    length = -(-size // parts)
    exact = next((n for n in range(length, min(2 * length, size // 2) + 1) if size % n == 0), None)
    if exact is not None:
        return AxisSplit(axis, size // exact, exact, 0)
    length = round_up(length, PART_MULTIPLE)
    return AxisSplit(axis, size // length, length, size % length)


def _reduce_in_parts(node: Node, x: Tensor, split: AxisSplit, computed: bool) -> Tensor:
    """The results of a reduction from those of its parts.

    A rest is reduced apart; for values that are `computed`, and then in two kernels, it is filled to a whole part.
    """
    op, axes, at = node.op, node.attrs["axis"], split.axis + x.ndim
    if op is reduce.sum and x.dtype.is_float and x.dtype != x.type.accumulate:
        x = cast(x, dtype=x.type.accumulate)
    parts, end = split.parts, split.parts * split.length
    main = narrow(x, at, 0, end) if split.rest else x
    if split.rest and computed:
        parts, end = parts + 1, int(x.shape[at])
        more = [split.length - split.rest if a == at else 0 for a in range(x.ndim)]
        neutral = find_neutral_element(KINDS[op], x.dtype)
        main = pad(x, low=(0,) * x.ndim, high=tuple(more), value=neutral)
    folded = reshape(main, shape=(*x.shape[:at], parts, split.length, *x.shape[at + 1 :]))
    inner = tuple(a if a >= split.axis else a - 1 for a in axes)
    total = op(op(folded, axis=inner, keepdims=True), axis=(split.axis - 1,), keepdims=False)
    if end < x.shape[at]:
        total = COMBINERS[op](total, op(narrow(x, at, end, int(x.shape[at])), axis=axes, keepdims=True))
    total = reshape(total, shape=node.out.type.shape)  # type: ignore[union-attr]
    dtype = node.out.type.dtype  # type: ignore[union-attr]
    return total if total.dtype == dtype else cast(total, dtype=dtype)


# Vector products: a matrix product with few rows or columns as a reduction of elementwise products. Such a product
# reads each element of the matrix once or a few times: it is bound by memory, and packing a matrix for a product of
# blocks would cost more than the product.


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
