"""Value-range analysis: the interval of each index scalar of a kernel, by interval arithmetic (Moore 1966)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tessera.core.types import int64
from tessera.ir.core import Node, Value
from tessera.ir.rules import Rules
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, elementwise

Interval = tuple[float, float]
UNBOUNDED: Interval = (-math.inf, math.inf)

interval_rule = Rules("interval")


class IntervalAnalysis:
    """Intervals of the scalars of one kernel; `grid` is the largest it is launched with, if known."""

    def __init__(self, producers: Mapping[Value, Node], grid: Sequence[int] | None) -> None:
        self.producers, self.grid = producers, grid
        self.known: dict[Value, Interval] = {}

    def of(self, v: Value) -> Interval:
        """The least and the greatest value."""
        if v not in self.known:
            node = self.producers.get(v)
            self.known[v] = self._found(v, node) if node is not None else UNBOUNDED
        return self.known[v]

    def _found(self, v: Value, node: Node) -> Interval:
        rule = interval_rule.get(node.op)
        # Narrower integers may wrap, which intervals do not see.
        fits = v.type.dtype == int64 or node.op is basic.full
        return rule(self, node) if rule is not None and fits else UNBOUNDED

    def loop(self, node: Node) -> None:
        """Note what the index of a `for` can be: its last round begins a whole number of steps after the first."""
        (low, first), (_, end), step = (self.of(v) for v in node.args[:3])
        if step[0] <= 0:
            return
        high = end - 1
        if low == first and step[0] == step[1] and math.isfinite(high):
            high = low + (high - low) // step[0] * step[0]
        self.known[node.regions[0].params[0]] = (low, high)

    def find_unproven_axes(
        self, starts: Sequence[Value], block: Sequence[int], sizes: Sequence[int]
    ) -> tuple[int, ...]:
        """The axes along which a block may lie partly outside."""
        bounds = [self.of(s) for s in starts]
        parts = enumerate(zip(bounds, block, sizes, strict=True))
        return tuple(a for a, ((low, high), n, size) in parts if low < 0 or high + n > size)


@interval_rule(tile.program_id)
def _(ranges, node):
    axis, grid = node.attrs["axis"], ranges.grid
    return (0, math.inf) if grid is None else (0, (grid[axis] if axis < len(grid) else 1) - 1)


@interval_rule(tile.local_id)
def _(ranges, node):
    return (0, math.inf)


@interval_rule(tile.grid_size, tile.group_size)
def _(ranges, node):
    return (1, math.inf)


@interval_rule(basic.full)
def _(ranges, node):
    return (node.attrs["value"], node.attrs["value"])


@interval_rule(basic.cast)
def _(ranges, node):
    source, to = node.args[0].type.dtype, node.attrs["dtype"]
    wider = source.is_integer and to.is_integer and to.bits >= source.bits and to.kind == "int"
    return ranges.of(node.args[0]) if wider else UNBOUNDED


def _combine_endpoints(f: Callable[[float, float], float]) -> Callable[[IntervalAnalysis, Node], Interval]:
    def rule(ranges: IntervalAnalysis, node: Node) -> Interval:
        a, b = (ranges.of(v) for v in node.args)
        found = [f(x, y) for x in a for y in b]
        return UNBOUNDED if any(math.isnan(x) for x in found) else _discard_wrapping(min(found), max(found))

    return rule


def _discard_wrapping(low: float, high: float) -> Interval:
    """Nothing is known of what may wrap."""
    return (low, high) if all(math.isinf(x) or abs(x) < 2**62 for x in (low, high)) else UNBOUNDED


def _multiply_endpoints(x: float, y: float) -> float:
    return 0 if x == 0 or y == 0 else x * y


def _floor_divide_endpoints(x: float, y: float) -> float:
    if y == 0 or math.isinf(y):
        return math.nan
    return x * (1 if y > 0 else -1) if math.isinf(x) else x // y


interval_rule(elementwise.add)(_combine_endpoints(lambda x, y: x + y))
interval_rule(elementwise.sub)(_combine_endpoints(lambda x, y: x - y))
interval_rule(elementwise.mul)(_combine_endpoints(_multiply_endpoints))
interval_rule(elementwise.maximum)(_combine_endpoints(max))
interval_rule(elementwise.minimum)(_combine_endpoints(min))


@interval_rule(elementwise.floor_divide)
def _(ranges, node):
    low, high = ranges.of(node.args[1])
    return _combine_endpoints(_floor_divide_endpoints)(ranges, node) if low > 0 or high < 0 else UNBOUNDED


@interval_rule(elementwise.remainder)
def _(ranges, node):
    low, high = ranges.of(node.args[1])
    return (0, high - 1) if low > 0 else UNBOUNDED
