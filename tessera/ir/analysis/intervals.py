"""Interval and divisibility analysis: ranges of integers, and factors that divide them, along use-def chains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tessera.core.symbolic_dim import Size, find_size_bounds
from tessera.core.types import int64
from tessera.ir.core import Node, Value
from tessera.ir.rules import Rules

# Divisibility analysis: a number that an index scalar is a multiple of, which proves alignment (Granger 1989).


MAX_DIVISOR = 1 << 20  # a divisor of 0: as good as any that is asked for
# rule(producers, node) gives a divisor of the result; for a loop, of its index.
divisor_rules = Rules("divisor")


def find_divisor(producers: Mapping[Value, Node], value: Value) -> int:
    """A number that a scalar is a multiple of; `producers` may map the index of a loop to the loop."""
    node = producers.get(value)
    if node is None or (node.regions and value in node.results):
        return 1
    rule = divisor_rules.get(node.op)
    return rule(producers, node) if rule is not None else 1


def find_common_divisor(producers: Mapping[Value, Node], node: Node) -> int:
    """A divisor of every operand, and so of their sums, differences, maxima and minima."""
    return math.gcd(*(find_divisor(producers, v) for v in node.args))


def multiply_divisors(producers: Mapping[Value, Node], node: Node) -> int:
    """A divisor of a product."""
    return min(MAX_DIVISOR, math.prod(find_divisor(producers, v) for v in node.args))


Interval = tuple[float, float]
UNBOUNDED: Interval = (-math.inf, math.inf)

# rule(analysis, node) gives the interval of the result.
interval_rules = Rules("interval")


class IntervalAnalysis:
    """Intervals of the scalars of one kernel; `grid` is the largest it is launched with, if known."""

    def __init__(self, producers: Mapping[Value, Node], grid: Sequence[float] | None) -> None:
        self.producers, self.grid = producers, grid
        self.known: dict[Value, Interval] = {}

    def of(self, v: Value) -> Interval:
        """The interval of a value: the least and the greatest number that it may be."""
        if v not in self.known:
            node = self.producers.get(v)
            self.known[v] = self._find(v, node) if node is not None else UNBOUNDED
        return self.known[v]

    def _find(self, v: Value, node: Node) -> Interval:
        rule = interval_rules.get(node.op)
        # Arithmetic on narrower integers may wrap; a constant does not.
        exact = v.type.dtype == int64 or not node.args
        if rule is None or not exact:
            return UNBOUNDED
        low, high = rule(self, node)  # ends that are symbolic sizes become what is proven of them
        return find_size_bounds(low)[0], find_size_bounds(high)[1]

    def loop(self, node: Node) -> None:
        """Note the interval of the index of a `for`: the last iteration is a whole number of steps after the first."""
        (low, first), (_, end), step = (self.of(v) for v in node.args[:3])
        if step[0] <= 0:
            return
        high = end - 1
        if low == first and step[0] == step[1] and math.isfinite(high):
            high = low + (high - low) // step[0] * step[0]
        self.known[node.regions[0].params[0]] = (low, high)

    def find_unproven_axes(
        self, starts: Sequence[Value], block: Sequence[int], sizes: Sequence[Size]
    ) -> tuple[int, ...]:
        """The axes along which a block is not proven to be in bounds."""
        bounds = [self.of(s) for s in starts]
        parts = enumerate(zip(bounds, block, sizes, strict=True))
        return tuple(a for a, ((low, high), n, size) in parts if low < 0 or high + n > find_size_bounds(size)[0])


def combine_endpoints(f: Callable[[float, float], float]) -> Callable[[IntervalAnalysis, Node], Interval]:
    """The rule of an op of two operands that is monotonic in each: its endpoints are those of the operands."""

    def rule(analysis: IntervalAnalysis, node: Node) -> Interval:
        x, y = (analysis.of(v) for v in node.args)
        found = [f(a, b) for a in x for b in y]
        return UNBOUNDED if any(math.isnan(n) for n in found) else _discard_wrapping(min(found), max(found))

    return rule


def _discard_wrapping(low: float, high: float) -> Interval:
    """Nothing is known of results that may wrap."""
    return (low, high) if all(math.isinf(n) or abs(n) < 2**62 for n in (low, high)) else UNBOUNDED


def multiply_endpoints(x: float, y: float) -> float:
    """A product, in which 0 times infinity is 0."""
    return 0 if x == 0 or y == 0 else x * y


def _divide_endpoints(x: float, y: float) -> float:
    if y == 0 or math.isinf(y):
        return math.nan
    return x * (1 if y > 0 else -1) if math.isinf(x) else x // y


def divide_intervals(analysis: IntervalAnalysis, node: Node) -> Interval:
    """The interval of a floor division, where the divisor cannot be 0."""
    low, high = analysis.of(node.args[1])
    return combine_endpoints(_divide_endpoints)(analysis, node) if low > 0 or high < 0 else UNBOUNDED


def bound_remainder(analysis: IntervalAnalysis, node: Node) -> Interval:
    """The interval of a floor remainder, where the divisor is positive."""
    low, high = analysis.of(node.args[1])
    return (0, high - 1) if low > 0 else UNBOUNDED
