"""The pass that leaves masks out where they hide nothing: for good, or in a loop's first rounds, which are split off.

A mask is a comparison of places. Where it compares sums of the loop's index, of scalars and of ramps, there is an
index up to which it holds for all elements; the rounds before are a loop of their own that selects nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.codegen.ptx.ops import streamed
from tessera.codegen.ptx.passes.affine import Sum, excess, surely_below
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ranges import Ranges
from tessera.evaluate import copier, copy_region, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ops import basic, control, elementwise, shape
from tessera.passes.dead_code import sweep
from tessera.types import int64

ALIKE = (basic.broadcast_to, shape.reshape)


def peeled(function: Function, grid: Sequence[int] | None) -> Function:
    """The function with its streamed loops at the top in two where that saves masks."""
    return sweep(Peeling(function, grid).run())


class Peeling:
    """The walk: which comparisons hold everywhere, always and in the rounds that are split off."""

    def __init__(self, function: Function, grid: Sequence[int] | None) -> None:
        self.function = function
        self.producers = {v: node for node in function.body.walk() for v in node.results}
        ranges = Ranges(self.producers, grid)
        for node in function.body.walk():
            if node.op is control.for_:
                ranges.loop(node)
        found = {n.out: e for n in function.body.walk() if (e := excess(self.producers, n)) is not None}
        self.open = {v: e for v, e in found.items() if not surely_below(ranges, e, sizes(v))}
        self.true = set(found) - set(self.open)

    def run(self) -> Function:
        """The function without the masks that hide nothing."""
        return rebuild(self.function, self._meaning_of)

    def _meaning_of(self, builder: Builder) -> Callable[..., Any]:
        copy = copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            if node.op is elementwise.where and self._holds(node.args[0]):
                return [args[1]]
            bounds = self._bounds(node) if node.op is control.for_ else {}
            if not bounds or node not in self.function.body.nodes:
                return copy(node, args, run)
            with builder.at(node.loc):
                return self._split(builder, node, bounds, args, run)

        return meaning

    def _holds(self, v: Value) -> bool:
        """Whether a mask is known to hold everywhere."""
        node = self.producers.get(v)
        if node is not None and node.op in ALIKE:
            return self._holds(node.args[0])
        return v in self.true

    def _bounds(self, loop: Node) -> dict[Value, Sum]:
        """The comparisons in a loop's body that hold below some index, with what is below 0 there."""
        (body,) = loop.regions
        index, made = body.params[0], {v for n in body.walk() for v in n.results} | set(body.params)
        step = self.producers.get(loop.args[2])
        if not any(n.op is streamed for n in body.nodes) or step is None or step.op is not basic.full:
            return {}
        inside = [v for n in body.nodes for v in n.results if v in self.open]
        known = {v: self.open[v] for v in inside if self.open[v].scalars.get(index) == 1}
        return {v: e for v, e in known.items() if not (made - {index}) & set(e.scalars)}

    def _split(
        self, builder: Builder, loop: Node, bounds: dict[Value, Sum], args: Sequence[Value], run: Any
    ) -> tuple[Value, ...]:
        """Two loops, one after the other; in the first the comparisons hold."""
        lower, upper, step, *state = args
        scalars = Scalars(builder)
        (body,) = loop.regions
        middle = upper
        for v, e in bounds.items():
            others = {run.env[x]: c for x, c in e.scalars.items() if x is not body.params[0]}
            middle = scalars.two(elementwise.minimum, middle, scalars.negative(Sum(e.most(sizes(v)), others)))
        self.true |= set(bounds)
        first = self._loop(builder, loop, [lower, middle, step, *state], run)
        self.true -= set(bounds)
        return self._loop(builder, loop, [scalars.after(lower, middle, step), upper, step, *first], run)

    def _loop(self, builder: Builder, loop: Node, args: Sequence[Value], run: Any) -> tuple[Value, ...]:
        region = copy_region(builder, loop.regions[0], run)
        types = tuple(v.type for v in loop.results)
        return builder.add(loop.op, args, loop.attrs, types=types, regions=(region,), loc=loop.loc).results


class Scalars:
    """Arithmetic on indices as nodes."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def number(self, value: int) -> Value:
        """A constant."""
        return self.builder.add(basic.full, [], {"shape": (), "value": value, "dtype": int64}).out

    def two(self, op: Any, x: Value, y: Value) -> Value:
        """An op on two scalars."""
        return self.builder.add(op, [x, y], {}).out

    def negative(self, found: Sum) -> Value:
        """0 less a sum of scalars."""
        total = self.number(-found.number)
        for v, c in found.scalars.items():
            total = self.two(elementwise.sub, total, self.two(elementwise.mul, v, self.number(c)))
        return total

    def after(self, lower: Value, upper: Value, step: Value) -> Value:
        """Where a loop from `lower` by `step` stands after its rounds before `upper`."""
        rest = self.two(elementwise.maximum, self.two(elementwise.sub, upper, lower), self.number(0))
        more = self.two(elementwise.add, rest, self.two(elementwise.sub, step, self.number(1)))
        rounds = self.two(elementwise.floor_divide, more, step)
        return self.two(elementwise.add, lower, self.two(elementwise.mul, rounds, step))
