"""Moment merging: statistics of long rows that need another one of the same row, from those of their parts.

A variance subtracts a mean, and a softmax a maximum, that is known once a row was read, so that a row which no program
holds is read twice. A part that a program holds is read once:
- for its sum and for the squared distances from its own mean m; those from any other centre c are more by the number
  of its elements times (m - c)² (Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing
  Sample Variances, 1979);
- for its maximum m and the sum of exp(x - m), which times exp(m - c) is that of exp(x - c) (Milakov and Gimelshein,
  Online Normalizer Calculation for Softmax, 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from tessera.core.symbolic_dim import symbol_names
from tessera.ir.core import Function, Node, Op, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.passes.reduction_splitting import SplitOperand, find_flat_chain
from tessera.ops.tensor import basic, elementwise, reduce, shape
from tessera.ops.tensor.reduce import reciprocal_count
from tessera.ops.tensor.shape import iota, pad, permute, reshape

LEAST_PART, MOST_PART = 1024, 8192  # elements of a part of a row
FILLED_PART = 2048  # elements of a part of a row that no length of parts divides
LEAST_ROW = 32  # elements of a row that is a part of its own
VECTOR = 4  # elements of f32 that a thread loads at once


@dataclass(frozen=True)
class RowParts:
    """Rows along the last axes of an array, in `count` parts of `length` elements; `lead` are the axes before them.

    The last part of a row lacks `missing` elements.
    """

    lead: tuple[int, ...]
    count: int
    length: int
    missing: int = 0

    def fold(self, x: Tensor) -> Tensor:
        """The parts of all rows, [R, length]."""
        rows = math.prod(self.lead)
        if self.missing:
            x = reshape(x, shape=(rows, self.count * self.length - self.missing))
            x = pad(x, low=(0, 0), high=(0, self.missing), value=0)
        return reshape(x, shape=(rows * self.count, self.length))

    def read(self, rewriter: Rewriter, x: Value) -> Tensor:
        """The parts of the rows of x, minus infinity for what they lack; what computes it element by element computes
        those of what it reads."""
        chain = find_flat_chain(rewriter.uses, x)
        rows = SplitOperand(rewriter, x, rewriter.new(x), get_shape(x), chain).view(self.fold)
        if not self.missing:
            return rows
        part, place = (iota(shape=rows.shape, axis=a) for a in (0, 1))
        end = self.count * self.length - self.missing
        held = elementwise.less(elementwise.remainder(part, self.count) * self.length + place, end)
        return elementwise.where(held, rows, -math.inf)

    def unfold(self, numbers: Tensor) -> Tensor:
        """Numbers of all parts, [R, 1], by the axes before the rows and the parts of a row."""
        return reshape(numbers, shape=(*self.lead, self.count))


@dataclass(frozen=True)
class MergedStatistic:
    """A sum over axes of what depends on x and on a centre, which depends on another statistic of the same rows."""

    first: Node  # the other statistic
    x: Value
    centre: Value  # of size 1 along the axes
    parts: RowParts
    merged: tuple[int, ...]  # the axes of `parts.lead`, and that of the parts, that are reduced

    @property
    def kept(self) -> tuple[int, ...]:
        """The axes of the parts' numbers that are not reduced."""
        return tuple(a for a in range(len(self.parts.lead) + 1) if a not in self.merged)

    def turn(self, numbers: Tensor) -> Tensor:
        """Numbers of all parts, [R, 1], as a row for each result."""
        held = self.parts.unfold(numbers)
        order, sizes = (*self.kept, *self.merged), tuple(held.shape[a] for a in self.kept)
        turned = held if order == tuple(range(held.ndim)) else permute(held, axes=order)
        return reshape(turned, shape=(*sizes, held.size // math.prod(sizes)))

    def combine_first(self, numbers: Tensor) -> Tensor:
        """The other statistic from those of the parts."""
        return reduce_rows(self.first.op, self.turn(numbers))

    def combine(self, rows: Tensor, numbers: Tensor, centre: Tensor) -> Tensor:
        """The sum from the parts' elements and the other statistic of each."""
        raise NotImplementedError


class SquaredDistances(MergedStatistic):
    """The sum of (x - centre)², where the centre depends on the sum of x."""

    def combine(self, rows: Tensor, numbers: Tensor, centre: Tensor) -> Tensor:
        """The sum of squared distances from that of each part from its own mean."""
        share = reciprocal_count(self.parts.length)
        apart = rows - numbers * share
        within = self.turn(reduce.sum(apart * apart, axis=(1,), keepdims=True))
        between = self.turn(numbers) * share - reshape(centre, shape=(*within.shape[:-1], 1))
        return reduce_rows(reduce.sum, within + between * between * float(self.parts.length))


class ShiftedExponentials(MergedStatistic):
    """The sum of exp(x - centre), where the centre is the maximum of x, or a constant where that is not finite."""

    def combine(self, rows: Tensor, numbers: Tensor, centre: Tensor) -> Tensor:
        """The sum of exponentials from that of each part relative to its own maximum, or to 0 if that is infinite."""
        shift = elementwise.where(elementwise.equal(elementwise.abs(numbers), math.inf), 0.0, numbers)
        within = self.turn(reduce.sum(elementwise.exp(rows - shift), axis=(1,), keepdims=True))
        scale = elementwise.exp(self.turn(numbers) - reshape(centre, shape=(*within.shape[:-1], 1)))
        return reduce_rows(reduce.sum, within * scale)


def reduce_rows(op: Op, numbers: Tensor) -> Tensor:
    """The sums or maxima of rows, which keep their axis."""
    return cast(Tensor, op(numbers, axis=(-1,), keepdims=True))


def merge_moments(function: Function, plan: LoweringPlan) -> Function:
    """Variances and sums of exponentials of rows that no program holds read what they are of once."""
    uses = UseDef(function)
    found = {node: match for node in function.body.nodes if (match := match_statistic(uses, node, plan))}
    firsts = {match.first: match for match in found.values()}
    parts: dict[Node, tuple[Tensor, Tensor]] = {}
    patterns = RewritePatterns("moment merging", same_types=True)

    @patterns(reduce.sum, reduce.max)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        if node in firsts:
            match = firsts[node]
            rows = match.parts.read(rewriter, match.x)
            numbers = cast(Tensor, node.op(rows, axis=(1,), keepdims=True))
            parts[node] = rows, numbers
            result = match.combine_first(numbers)
        elif node in found:
            match = found[node]
            result = match.combine(*parts[match.first], Tensor(rewriter.new(match.centre)))
        else:
            return None
        return reshape(result, shape=get_shape(node.out)).data

    return rewrite_function(function, patterns, remove_dead=True) if found else function


def match_statistic(uses: UseDef, node: Node, plan: LoweringPlan) -> MergedStatistic | None:
    """A node as a statistic of rows that no program of the target holds, which reads them twice, or None."""
    for value, axes in list_reduced(uses, node, reduce.sum):
        made = uses.get(value)
        if made is not None and made.op is elementwise.mul and made.args[0] is made.args[1]:
            return _match_centred(uses, node, made.args[0], axes, plan, SquaredDistances)
        if made is not None and made.op is elementwise.exp:
            return _match_centred(uses, node, made.args[0], axes, plan, ShiftedExponentials)
    return None


def _match_centred(
    uses: UseDef, node: Node, value: Value, axes: tuple[int, ...], plan: LoweringPlan, kind: type[MergedStatistic]
) -> MergedStatistic | None:
    """The statistic of a value that is x - centre."""
    difference = uses.get(value)
    if difference is None or difference.op is not elementwise.sub:
        return None
    x, spread = difference.args
    type = get_tensor_type(x)
    if type.policy is not None or not type.dtype.is_float or type.dtype.bits < 32 or symbol_names(type.shape):
        return None
    sizes = tuple(int(n) for n in type.shape)
    if math.prod(sizes[a] for a in axes) <= plan.row_limit or get_shape(value) != sizes:
        return None
    chain = find_flat_chain(uses, x)
    if chain is None:  # rows of parts would be copied
        return None
    if kind is ShiftedExponentials and _is_narrow(uses, x, chain, axes, plan):
        return None
    parts, centre = divide_rows(sizes, axes, kind is ShiftedExponentials), _find_narrow(uses, spread, sizes, axes)
    first = None if centre is None else next(_find_firsts(uses, centre, x, axes, kind), None)
    if parts is None or centre is None or first is None or uses.block_of(first) is not uses.block_of(node):
        return None
    lead = len(parts.lead)
    return kind(first, x, centre, parts, tuple(sorted({min(a, lead) for a in axes})))


def _is_narrow(uses: UseDef, x: Value, chain: frozenset[Value], axes: tuple[int, ...], plan: LoweringPlan) -> bool:
    """Whether rows that are computed from narrow types are no longer in memory than rows of f32 that a program holds: a
    target may hold them beside its registers."""
    sizes, leaves = get_shape(x), {v for value in chain for v in uses[value].args if v not in chain}
    bits = [get_tensor_type(v).dtype.bits for v in leaves or {x} if math.prod(get_shape(v)) == math.prod(sizes)]
    return math.prod(int(sizes[a]) for a in axes) * max(bits, default=32) <= 32 * plan.row_limit


def list_reduced(uses: UseDef, node: Node, op: Op) -> Iterator[tuple[Value, tuple[int, ...]]]:
    """What a reduction reads, and along which axes: as it is written, and before these axes became the last one."""
    if node.op is not op:
        return
    rank = len(get_shape(node.args[0]))
    axes = tuple(sorted(a % rank for a in node.attrs["axis"]))
    yield node.args[0], axes
    view = uses.get(node.args[0])
    if view is None or view.op is not shape.reshape or axes != (rank - 1,):
        return
    held, turned = view.args[0], uses.get(view.args[0])
    order = tuple(range(len(get_shape(held))))
    if turned is not None and turned.op is shape.permute:
        held, order = turned.args[0], tuple(a % len(order) for a in turned.attrs["axes"])
    kept = order[: rank - 1]
    if list(kept) == sorted(kept) and tuple(get_shape(held)[a] for a in kept) == get_shape(view.out)[:-1]:
        yield held, tuple(sorted(order[rank - 1 :]))


def divide_rows(sizes: tuple[int, ...], axes: tuple[int, ...], fills: bool = False) -> RowParts | None:
    """The parts of rows along the reduced axes that are last; None where no divisor fits, or these axes are short.

    `fills`: where no divisor fits the last part lacks elements.
    """
    first = next((a + 1 for a in range(len(sizes) - 1, -1, -1) if a not in axes), 0)
    length = math.prod(sizes[first:])
    if first == len(sizes) or length < LEAST_ROW:
        return None
    if length <= MOST_PART:
        return RowParts(sizes[:first], 1, length)
    divisors = [n for n in range(LEAST_PART, MOST_PART + 1) if length % n == 0]
    # Threads are a power of two: they should have the same number of elements.
    best = max(divisors, key=lambda n: (n % VECTOR == 0, n / (1 << (n - 1).bit_length()), n), default=None)
    if best is None and fills:
        count = -(-length // FILLED_PART)
        return RowParts(sizes[:first], count, FILLED_PART, count * FILLED_PART - length)
    return None if best is None else RowParts(sizes[:first], length // best, best)


def _find_narrow(uses: UseDef, value: Value, sizes: tuple[int, ...], axes: tuple[int, ...]) -> Value | None:
    """What is broadcast to a value, if it has one element along the axes."""
    node = uses.get(value)
    if node is None or node.op is not basic.broadcast_to:
        return None
    held = get_shape(node.args[0])
    wanted = tuple(1 if a in axes else n for a, n in enumerate(sizes))
    return node.args[0] if held == wanted[len(wanted) - len(held) :] and math.prod(held) == math.prod(wanted) else None


def _find_firsts(
    uses: UseDef, value: Value, x: Value, axes: tuple[int, ...], kind: type[MergedStatistic]
) -> Iterator[Node]:
    """The statistics of x over axes from which a centre is computed, element by element."""
    op, between = FIRSTS[kind]
    node = uses.get(value)
    if node is None:
        return
    if node.op is op:
        if (x, axes) in list_reduced(uses, node, op):
            yield node
    elif (
        node.op in (basic.broadcast_to, shape.reshape) or (between is None and node.op.pointwise) or node.op is between
    ):
        for each in node.args[node.op is elementwise.where :]:
            yield from _find_firsts(uses, each, x, axes, kind)


# The statistic that a centre depends on, and the pointwise op that may lie between (None: any).
FIRSTS: dict[type[MergedStatistic], tuple[Op, Op | None]] = {
    SquaredDistances: (reduce.sum, None),
    ShiftedExponentials: (reduce.max, elementwise.where),
}
