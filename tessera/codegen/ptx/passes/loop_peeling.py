"""Loop peeling and mask elimination: rounds in which a mask holds everywhere are split off without it.

A mask is a comparison of affine index forms. Masks that remain are compared in 32 bits, a thread's own part against a
constant for each element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.codegen.ptx.context import EmissionContext
from tessera.codegen.ptx.ops import async_mma, indices_below
from tessera.codegen.ptx.passes.index_analysis import find_excess, is_always_negative
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.table import emission_rule
from tessera.core.types import int64
from tessera.ir.analysis.affine import AffineForm
from tessera.ir.analysis.intervals import IntervalAnalysis
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ir.evaluator import copy_region, make_copier, rebuild_function
from tessera.ir.rewrite import eliminate_dead_code
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import basic, elementwise, shape

# The pass that leaves masks out where they hide nothing: for good, or in a loop's first rounds, which are split off.
#
# A mask is a comparison of places. Where it compares sums of the loop's index, of scalars and of ramps, there is an
# index up to which it holds for all elements; the rounds before are a loop of their own that selects nothing.


VIEW_OPS = (basic.broadcast_to, shape.reshape)


def peel_masked_loops(function: Function, grid: Sequence[int] | None) -> Function:
    """The function with its streamed loops at the top in two where that saves masks."""
    return eliminate_dead_code(LoopPeeler(function, grid).run())


class LoopPeeler:
    """The walk: which comparisons hold everywhere, always and in the rounds that are split off."""

    def __init__(self, function: Function, grid: Sequence[int] | None) -> None:
        self.function = function
        self.producers = {v: node for node in function.body.walk() for v in node.results}
        ranges = IntervalAnalysis(self.producers, grid)
        for node in function.body.walk():
            if node.op is control_flow.for_:
                ranges.loop(node)
        found = {n.out: e for n in function.body.walk() if (e := find_excess(self.producers, n)) is not None}
        self.open = {v: e for v, e in found.items() if not is_always_negative(ranges, e, static_shape(v))}
        self.true = set(found) - set(self.open)

    def run(self) -> Function:
        """The function without the masks that hide nothing."""
        return rebuild_function(self.function, self._meaning_of)

    def _meaning_of(self, builder: Builder) -> Callable[..., Any]:
        copy = make_copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            if node.op is elementwise.where and self._holds(node.args[0]):
                return [args[1]]
            bounds = self._bounds(node) if node.op is control_flow.for_ else {}
            if not bounds or node not in self.function.body.nodes:
                return copy(node, args, run)
            with builder.at(node.loc):
                return self._split(builder, node, bounds, args, run)

        return meaning

    def _holds(self, v: Value) -> bool:
        """Whether a mask is known to hold everywhere."""
        node = self.producers.get(v)
        if node is not None and node.op in VIEW_OPS:
            return self._holds(node.args[0])
        return v in self.true

    def _bounds(self, loop: Node) -> dict[Value, AffineForm]:
        """The comparisons in a loop's body that hold below some index, with what is below 0 there."""
        (body,) = loop.regions
        index, made = body.params[0], {v for n in body.walk() for v in n.results} | set(body.params)
        step = self.producers.get(loop.args[2])
        if not any(n.op is async_mma for n in body.nodes) or step is None or step.op is not basic.full:
            return {}
        inside = [v for n in body.nodes for v in n.results if v in self.open]
        known = {v: self.open[v] for v in inside if self.open[v].scalars.get(index) == 1}
        return {v: e for v, e in known.items() if not (made - {index}) & set(e.scalars)}

    def _split(
        self, builder: Builder, loop: Node, bounds: dict[Value, AffineForm], args: Sequence[Value], run: Any
    ) -> tuple[Value, ...]:
        """Two loops, one after the other; in the first the comparisons hold."""
        lower, upper, step, *state = args
        scalars = IndexArithmetic(builder)
        (body,) = loop.regions
        middle = upper
        for v, e in bounds.items():
            others = {run.env[x]: c for x, c in e.scalars.items() if x is not body.params[0]}
            middle = scalars.two(
                elementwise.minimum,
                middle,
                scalars.negative(AffineForm(e.upper_bound_of_block(static_shape(v)), others)),
            )
        self.true |= set(bounds)
        first = self._loop(builder, loop, [lower, middle, step, *state], run)
        self.true -= set(bounds)
        return self._loop(builder, loop, [scalars.after(lower, middle, step), upper, step, *first], run)

    def _loop(self, builder: Builder, loop: Node, args: Sequence[Value], run: Any) -> tuple[Value, ...]:
        region = copy_region(builder, loop.regions[0], run)
        types = tuple(v.type for v in loop.results)
        return builder.add(loop.op, args, loop.attrs, types=types, regions=(region,), loc=loop.loc).results


class IndexArithmetic:
    """Arithmetic on indices as nodes."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def number(self, value: int) -> Value:
        """A constant."""
        return self.builder.add(basic.full, [], {"shape": (), "value": value, "dtype": int64}).out

    def two(self, op: Any, x: Value, y: Value) -> Value:
        """An op on two scalars."""
        return self.builder.add(op, [x, y], {}).out

    def negative(self, found: AffineForm) -> Value:
        """0 less a sum of scalars."""
        total = self.number(-found.constant)
        for v, c in found.scalars.items():
            total = self.two(elementwise.sub, total, self.two(elementwise.mul, v, self.number(c)))
        return total

    def after(self, lower: Value, upper: Value, step: Value) -> Value:
        """Where a loop from `lower` by `step` stands after its rounds before `upper`."""
        rest = self.two(elementwise.maximum, self.two(elementwise.sub, upper, lower), self.number(0))
        more = self.two(elementwise.add, rest, self.two(elementwise.sub, step, self.number(1)))
        rounds = self.two(elementwise.floor_divide, more, step)
        return self.two(elementwise.add, lower, self.two(elementwise.mul, rounds, step))


# Comparisons of places in 32 bits: one number of a thread's own against a constant for each element.


LIMIT_CLAMP = 1 << 30  # further than any place in a block: so much of a limit is enough


def narrow_index_comparisons(function: Function) -> Function:
    """The function with each comparison of blocks of places against a sum of scalars as one op."""
    producers = {v: n for n in function.body.walk() for v in n.results}

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = make_copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            found = find_excess(producers, node)
            if found is None or not found.ramps:
                return copy(node, args, run)
            with builder.at(node.loc):
                scalars = {run.env[v]: c for v, c in found.scalars.items()}
                limit = IndexArithmetic(builder).negative(AffineForm(found.constant, scalars))
            shape = static_shape(node.out)
            steps = tuple(found.ramps.get(a - len(shape), 0) for a in range(len(shape)))
            return builder.add(indices_below, [limit], {"shape": shape, "steps": steps}, loc=node.loc).results

        return meaning

    return eliminate_dead_code(rebuild_function(function, meaning_of))


@emission_rule(indices_below)
def _(ctx: EmissionContext, node: Node) -> None:
    """What is left of the limit by the thread's own place is compared with what registers add to that."""
    text, team, layout = ctx.text, ctx.team, ctx.layout(node.out)
    near = text.let(
        "max.s64", "b64", text.let("min.s64", "b64", ctx.scalar_operand(node.args[0]), LIMIT_CLAMP), -LIMIT_CLAMP
    )
    left = text.let("cvt.u32.u64", "b32", near)
    for axis, step in enumerate(node.attrs["steps"]):
        place = team.thread_offset(layout, axis) if step else "0"
        if place != "0":
            part = team.hoist(("steps", place, step), "mul.lo.s32", "b32", place, -step)
            left = text.let("add.s32", "b32", left, part)
    known: dict[int, str] = {}
    found = []
    for offsets in layout.offsets:
        more = sum(n * step for n, step in zip(offsets, node.attrs["steps"], strict=True))
        known[more] = known.get(more) or text.let("setp.gt.s32", "pred", left, more)
        found.append(known[more])
    ctx.values[node.out] = tuple(found)
