"""Index-set splitting: a loop is divided where a comparison of its index with a constant changes its value.

In a part whose vectors all lie on one side, the comparison is a constant, and only the chosen operand of a selection is
computed: the parts of a concatenation are copies, and the inside of a padded array needs no masks (Wolfe 1996).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tessera.codegen.contract import static_shape
from tessera.codegen.llvm.text.builder import LaneValue, format_prefix_mask
from tessera.core.types import int64
from tessera.ir.core import Node, Value
from tessera.ir.rules import Op
from tessera.ops.tensor import basic, elementwise, shape

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext

MAX_PARTS = 7  # each part of a loop has its own copy of the body
MAX_OUTER_PARTS = 4  # of a loop around the innermost one

COMPARISONS: dict[Op, Callable[[Any, Any], bool]] = {
    elementwise.less: operator.lt, elementwise.less_equal: operator.le, elementwise.greater: operator.gt,
    elementwise.greater_equal: operator.ge, elementwise.equal: operator.eq, elementwise.not_equal: operator.ne,
}  # fmt: skip
_AT, _AFTER = (0,), (1,)
# Where a comparison of a number with a constant changes, counted from the constant, and one the other way round.
_CHANGES: dict[Op, tuple[tuple[int, ...], tuple[int, ...]]] = {
    elementwise.less: (_AT, _AFTER), elementwise.greater_equal: (_AT, _AFTER),
    elementwise.less_equal: (_AFTER, _AT), elementwise.greater: (_AFTER, _AT),
    elementwise.equal: (_AT + _AFTER, _AT + _AFTER), elementwise.not_equal: (_AT + _AFTER, _AT + _AFTER),
}  # fmt: skip
TRUTHS = {True: LaneValue("true"), False: LaneValue("false")}


@dataclass(frozen=True)
class Strip:
    """A part of an axis in steps of vectors; `mask` is that of its only vector, where it is partial."""

    start: int
    stop: int
    width: int
    mask: str | None = None


def find_cuts(kernel: LlvmKernelContext, count: int, start: Value | None = None) -> list[int]:
    """Where a comparison of a position along an axis with a constant changes, within a block of `count` elements.

    With a block's `start`, the cuts are those of the whole axis of memory.
    """
    cuts: set[int] = set()
    for node in kernel.producers.values():
        if node.op not in COMPARISONS or node.args[0].type.dtype != int64:
            continue
        for changes, (index, limit) in zip(_CHANGES[node.op], (node.args, node.args[::-1]), strict=True):
            offset, constant = _find_offset(kernel, index, count, start), _find_constant(kernel, limit)
            if offset is not None and constant is not None:
                cuts |= {constant - offset + c for c in changes}
    return sorted(c for c in cuts if 0 < c and (c < count or start is not None))


def find_regions(kernel: LlvmKernelContext, start: Value, count: int, size: int) -> list[tuple[int, int]]:
    """Between which starts whole blocks of `count` elements lie where no comparison changes; [] where none does.

    `start` is that of a block along an axis of `size` elements.
    """
    cuts = [c for c in find_cuts(kernel, count, start) if c < size]
    if not 0 < len(cuts) < MAX_OUTER_PARTS:
        return []
    found = [(low, high - count) for low, high in itertools.pairwise([0, *cuts, size])]
    return [(low, last) for low, last in found if low <= last]


def divide_axis(kernel: LlvmKernelContext, count: int) -> list[tuple[int, int]]:
    """The parts of an axis, around the innermost loop, in which no comparison of a position changes; or the whole."""
    bounds = [0, *find_cuts(kernel, count), count]
    return list(itertools.pairwise(bounds)) if len(bounds) <= MAX_OUTER_PARTS + 1 else [(0, count)]


def _find_offset(kernel: LlvmKernelContext, v: Value, count: int, start: Value | None = None) -> int | None:
    """The constant that an iota along an axis of `count` elements, from `start` if given, is shifted by for a value."""
    node = kernel.producers.get(v)
    if start is not None and count == 1 and v is start:
        return 0
    if node is None:
        return None
    if node.op is shape.iota:
        return 0 if static_shape(v.type)[node.attrs["axis"]] == count and start is None else None
    if node.op is elementwise.add:
        for x, y in (node.args, node.args[::-1]):
            is_start = start is not None and _is_copy(kernel, y, start)
            inner, constant = _find_offset(kernel, x, count, None if is_start else start), _find_constant(kernel, y)
            if inner is not None and (is_start or constant is not None):
                return inner + (constant or 0)
    return None


def _is_copy(kernel: LlvmKernelContext, v: Value, scalar: Value) -> bool:
    """Whether a value is a scalar, or a block of its copies."""
    node = kernel.producers.get(v)
    return v is scalar or (
        node is not None and node.op is basic.broadcast_to and _is_copy(kernel, node.args[0], scalar)
    )


def _find_constant(kernel: LlvmKernelContext, v: Value) -> int | None:
    node = kernel.producers.get(v)
    return int(node.attrs["value"]) if node is not None and node.op is basic.full else None


def strip_mine(count: int, width: int, cuts: Sequence[int] = ()) -> list[Strip]:
    """An axis as full vectors and a masked remainder; vectors with a cut within are parts of their own."""
    whole = count // width * width
    bounds = {0, whole} | {x for c in cuts for x in (c // width * width, -(-c // width) * width) if x <= whole}
    starts = sorted(bounds) if len(bounds) <= MAX_PARTS + 1 else [0, whole]
    parts = [Strip(a, b, width) for a, b in zip(starts, starts[1:], strict=False) if a < b]
    rest = [Strip(whole, count, width, format_prefix_mask(width, count - whole))] if count > whole else []
    return [*parts, *rest]


def compare_spans(node: Node, lanes: Sequence[LaneValue]) -> LaneValue | None:
    """The value of a comparison that is the same for every pair of numbers of two spans, or None."""
    if node.op not in COMPARISONS or node.args[0].type.dtype != int64:
        return None
    first, second = (lane.interval for lane in lanes)
    if first is None or second is None:
        return None
    (a, b), (c, d) = first, second
    if node.op in (elementwise.equal, elementwise.not_equal):
        return TRUTHS[node.op is elementwise.not_equal] if b < c or d < a else None
    compare = COMPARISONS[node.op]
    # These are monotonic: the extreme pairs decide.
    found = {compare(a, d), compare(b, c)}
    return TRUTHS[found.pop()] if len(found) == 1 else None


def shift_span(a: LaneValue, b: LaneValue, sign: int = 1) -> tuple[int, int] | None:
    """The span of a sum, or with sign -1 of a difference, of two indices of which at most one is a ramp."""
    first, second = a.interval, b.interval
    if first is None or second is None:
        return None
    (low, high), (c, d) = first, second
    return (low + c, high + d) if sign > 0 else (low - d, high - c)
