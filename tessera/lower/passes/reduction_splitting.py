"""Reduction splitting (rfactor): long reductions with few results become partial results and their combination.

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
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.passes.canonicalisation import COMBINERS
from tessera.lower.schedule_to_tile.reductions import find_neutral_element
from tessera.ops.tensor import reduce
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
