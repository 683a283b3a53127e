"""Moment merging: sums of squared distances of long rows from the moments of their parts (Chan, Golub and LeVeque,
Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979).

A variance subtracts a mean that is known once a row was read, so that a row which no program holds is read twice. A
part that a program holds is read once, for its sum and for the squared distances from its own mean m; those from any
other centre c are more by the number of its elements times (m - c)².
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from tessera.core.symbolic_dim import symbol_names
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.passes.reduction_splitting import SplitOperand, find_flat_chain
from tessera.ops.tensor import basic, elementwise, reduce, shape
from tessera.ops.tensor.reduce import reciprocal_count
from tessera.ops.tensor.shape import permute, reshape

LEAST_PART, MOST_PART = 1024, 8192  # elements of a part of a row
LEAST_ROW = 32  # elements of a row that is a part of its own
VECTOR = 4  # elements of f32 that a thread loads at once


@dataclass(frozen=True)
class RowParts:
    """Rows along the last axes of an array, in `count` parts of `length` elements; `lead` are the axes before them."""

    lead: tuple[int, ...]
    count: int
    length: int

    def fold(self, x: Tensor) -> Tensor:
        """The parts of all rows, [R, length]."""
        return reshape(x, shape=(math.prod(self.lead) * self.count, self.length))

    def read(self, rewriter: Rewriter, x: Value) -> Tensor:
        """The parts of the rows of x; what computes it element by element computes those of what it reads."""
        chain = find_flat_chain(rewriter.uses, x)
        return SplitOperand(rewriter, x, rewriter.new(x), get_shape(x), chain).view(self.fold)

    def unfold(self, numbers: Tensor) -> Tensor:
        """Numbers of all parts, [R, 1], by the axes before the rows and the parts of a row."""
        return reshape(numbers, shape=(*self.lead, self.count))


@dataclass(frozen=True)
class SquaredDistances:
    """The sum of (x - centre)² over axes, where the centre depends on the sum of x over the same axes (`total`)."""

    total: Node
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

    def add_distances(self, rows: Tensor, sums: Tensor, centre: Tensor) -> Tensor:
        """The sum of squared distances from that of each part from its own mean."""
        share = reciprocal_count(self.parts.length)
        apart = rows - sums * share
        within = self.turn(reduce.sum(apart * apart, axis=(1,), keepdims=True))
        between = self.turn(sums) * share - reshape(centre, shape=(*within.shape[:-1], 1))
        return add_rows(within + between * between * float(self.parts.length))


def add_rows(numbers: Tensor) -> Tensor:
    """The sums of rows, which keep their axis."""
    return cast(Tensor, reduce.sum(numbers, axis=(-1,), keepdims=True))


def merge_moments(function: Function, plan: LoweringPlan) -> Function:
    """Variances of rows that no program holds read what they are of once."""
    if plan.parallel is None or not plan.shares_rows:
        return function
    uses = UseDef(function)
    found = {node: pair for node in function.body.nodes if (pair := match_squared_distances(uses, node, plan))}
    totals = {pair.total: pair for pair in found.values()}
    moments: dict[Node, tuple[Tensor, Tensor]] = {}
    patterns = RewritePatterns("moment merging", same_types=True)

    @patterns(reduce.sum)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        if node in totals:
            pair = totals[node]
            rows = pair.parts.read(rewriter, pair.x)
            sums = reduce.sum(rows, axis=(1,), keepdims=True)
            moments[node] = rows, sums
            result = add_rows(pair.turn(sums))
        elif node in found:
            pair = found[node]
            result = pair.add_distances(*moments[pair.total], Tensor(rewriter.new(pair.centre)))
        else:
            return None
        return reshape(result, shape=get_shape(node.out)).data

    return rewrite_function(function, patterns, remove_dead=True) if found else function


def match_squared_distances(uses: UseDef, node: Node, plan: LoweringPlan) -> SquaredDistances | None:
    """A node as a sum of squared distances of rows that no program of the target holds, or None."""
    squares, axes, square = next(
        ((v, at, made) for v, at in list_summed(uses, node) if (made := uses.get(v)) and made.op is elementwise.mul),
        (None, (), None),
    )
    if squares is None or square is None or square.args[0] is not square.args[1]:
        return None
    difference = uses.get(square.args[0])
    if difference is None or difference.op is not elementwise.sub:
        return None
    x, spread = difference.args
    type = get_tensor_type(x)
    if type.policy is not None or not type.dtype.is_float or type.dtype.bits < 32 or symbol_names(type.shape):
        return None
    sizes = tuple(int(n) for n in type.shape)
    if math.prod(sizes[a] for a in axes) <= plan.row_limit or get_shape(squares) != sizes:
        return None
    if find_flat_chain(uses, x) is None:  # rows of parts would be copied
        return None
    parts, centre = divide_rows(sizes, axes), _find_narrow(uses, spread, sizes, axes)
    total = None if centre is None else next(_find_totals(uses, centre, x, axes), None)
    if parts is None or centre is None or total is None or uses.block_of(total) is not uses.block_of(node):
        return None
    lead = len(parts.lead)
    return SquaredDistances(total, x, centre, parts, tuple(sorted({min(a, lead) for a in axes})))


def list_summed(uses: UseDef, node: Node) -> Iterator[tuple[Value, tuple[int, ...]]]:
    """What a sum adds up, and along which axes: as it is written, and before these axes became the last one."""
    if node.op is not reduce.sum:
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


def divide_rows(sizes: tuple[int, ...], axes: tuple[int, ...]) -> RowParts | None:
    """The parts of rows along the reduced axes that are last; None where no divisor fits, or these axes are short."""
    first = next((a + 1 for a in range(len(sizes) - 1, -1, -1) if a not in axes), 0)
    length = math.prod(sizes[first:])
    if first == len(sizes) or length < LEAST_ROW:
        return None
    if length <= MOST_PART:
        return RowParts(sizes[:first], 1, length)
    divisors = [n for n in range(LEAST_PART, MOST_PART + 1) if length % n == 0]
    # Threads are a power of two: they should have the same number of elements.
    best = max(divisors, key=lambda n: (n % VECTOR == 0, n / (1 << (n - 1).bit_length()), n), default=None)
    return None if best is None else RowParts(sizes[:first], length // best, best)


def _find_narrow(uses: UseDef, value: Value, sizes: tuple[int, ...], axes: tuple[int, ...]) -> Value | None:
    """What is broadcast to a value, if it has one element along the axes."""
    node = uses.get(value)
    if node is None or node.op is not basic.broadcast_to:
        return None
    held = get_shape(node.args[0])
    wanted = tuple(1 if a in axes else n for a, n in enumerate(sizes))
    return node.args[0] if held == wanted[len(wanted) - len(held) :] and math.prod(held) == math.prod(wanted) else None


def _find_totals(uses: UseDef, value: Value, x: Value, axes: tuple[int, ...]) -> Iterator[Node]:
    """The sums of x over axes from which a value is computed, element by element."""
    node = uses.get(value)
    if node is None:
        return
    if node.op is reduce.sum:
        if (x, axes) in list_summed(uses, node):
            yield node
    elif node.op.pointwise or node.op in (basic.broadcast_to, shape.reshape):
        for each in node.args:
            yield from _find_totals(uses, each, x, axes)
