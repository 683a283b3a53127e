"""Loop transformations: invariant code motion of scalars, code sinking, peeling with mask elimination, and comparisons
of indices in 32 bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tessera.codegen.ptx.context import EmissionContext
from tessera.codegen.ptx.layout import bit_width
from tessera.codegen.ptx.ops import async_mma, indices_below
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.mainloop import is_scalar_arithmetic
from tessera.codegen.ptx.passes.shared_memory import MAX_EARLY_LOADED, is_movable_load
from tessera.codegen.ptx.table import emission_rule
from tessera.core.types import int64
from tessera.ir.analysis import AffineAnalysis, AffineForm, IntervalAnalysis
from tessera.ir.builder import Builder
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, eliminate_dead_code, rewrite_function
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, contractions, elementwise, shape

# Index analysis: for comparisons of affine index blocks, the form that is negative where they hold.


# A comparison holds where the first of its operands, less the second, is below a number; or with operands exchanged.
COMPARISON_OPS = {elementwise.less: (False, 0), elementwise.less_equal: (False, 1), elementwise.greater: (True, 0),
         elementwise.greater_equal: (True, 1)}  # fmt: skip


def find_excess(producers: Mapping[Value, Node], node: Node) -> AffineForm | None:
    """The affine form that is negative exactly where a comparison of indices holds; None for any other node."""
    if node.op not in COMPARISON_OPS:
        return None
    exchanged, offset = COMPARISON_OPS[node.op]
    analysis = AffineAnalysis(producers)
    x, y = (analysis.find_form(v) for v in (reversed(node.args) if exchanged else node.args))
    return None if x is None or y is None else x.plus(y, -1).plus(AffineForm(-offset))


def is_always_negative(ranges: IntervalAnalysis, form: AffineForm, block: tuple[int, ...]) -> bool:
    """Whether a form is negative everywhere in a block, for all programs and iterations."""
    ends = (max(c * end for end in ranges.of(v)) for v, c in form.scalars.items())
    return form.upper_bound_of_block(block) + sum(ends) < 0


def align_rows(function: Function) -> Function:
    """The function with whole vectors of its rows (`row_alignment.py`), where these begin anywhere."""
    sizes = [n.args[0].type.shape for n in function.body.walk() if n.op is tile.load]  # type: ignore[union-attr]
    if not any(size and isinstance(size[-1], int) and size[-1] % 8 for size in sizes):
        return function
    from tessera.codegen.ptx.passes import row_alignment  # few programs have such rows

    return row_alignment.align_rows(function)


def cache_rows(function: Function) -> Function:
    """The function with rows that it walks several times in shared memory (`row_caching.py`)."""
    if sum(n.op is control_flow.for_ for n in function.body.nodes) < 2:
        return function
    from tessera.codegen.ptx.passes import row_caching  # few programs walk rows in loops

    return row_caching.cache_rows(function)


# Invariant code motion: scalars that a loop computes alike in each round are computed before it. Matching of loops
# (`mainloop.py`) then finds blocks at the loop's index and at scalars that are known before.


def hoist_scalars(function: Function) -> Function:
    """The function with the scalar arithmetic of loops that does not depend on the round before the loops."""
    uses = UseDef(function)
    return Function(function.name, _hoist_from_loops(function.body, uses), function.attrs, function.loc)


def _hoist_from_loops(block: Block, uses: UseDef) -> Block:
    order: list[Node] = []
    for node in block.nodes:
        if node.regions:
            node = replace(node, regions=tuple(_hoist_from_loops(r, uses) for r in node.regions))
        if node.op is control_flow.for_:
            moved = _find_invariant_scalars(node.regions[0], uses)
            body = node.regions[0]
            rest = tuple(n for n in body.nodes if n not in moved)
            order += moved
            node = replace(node, regions=(replace(body, nodes=rest),)) if moved else node
        order.append(node)
    return replace(block, nodes=tuple(order))


def _find_invariant_scalars(body: Block, uses: UseDef) -> list[Node]:
    """The scalar arithmetic of a loop's body that depends on nothing in it; a divisor is a number other than 0."""
    varying = {*body.params, *(v for n in body.nodes for v in n.results)}
    found: list[Node] = []
    for node in body.nodes:
        if not is_scalar_arithmetic(node) or varying & set(node.args):
            continue
        divides = node.op in (elementwise.floor_divide, elementwise.remainder, elementwise.div)
        if not divides or ((n := uses.get(node.args[1])) is not None and n.op is basic.full and n.attrs["value"]):
            found.append(node)
            varying -= set(node.results)
    return found


# Code sinking: what only the epilogue of a loop of products reads is computed after the loop. Before it, blocks would
# take the registers of the accumulator for all rounds.


def sink_past_products(function: Function) -> Function:
    """The function with blocks, and loads of memory that it never writes, after the loops of products at its top level
    that do not read them."""
    written, uses = tile.find_written_refs(function.body), UseDef(function)
    order, waiting = list[Node](), list[Node]()
    for node in function.body.nodes:
        if _is_sinkable(node, written):
            waiting.append(node)
            continue
        needed = set(uses.backward_slice(_list_read(node)))
        order += [*(n for n in waiting if n in needed), node]
        waiting = [n for n in waiting if n not in needed]
        if any(n.op is contractions.dot for r in node.regions for n in r.walk()):
            order, waiting = [*order, *waiting], []
    return Function(function.name, replace(function.body, nodes=(*order, *waiting)), function.attrs, function.loc)


def _is_sinkable(node: Node, written: set[Value]) -> bool:
    """Whether a node makes a block that is too large to be kept in registers beside an accumulator."""
    if len(node.results) != 1 or node.regions or math.prod(static_shape(node.out)) <= MAX_EARLY_LOADED:
        return False
    moves = node.op in (basic.full, basic.cast, basic.broadcast_to, shape.reshape, shape.permute)
    return node.op.pointwise or moves or (node.op is tile.load and is_movable_load(node, written))


def _list_read(node: Node) -> list[Value]:
    """The values that a node reads, and those that its regions read."""
    inside = [v for r in node.regions for v in (*r.results, *(a for n in r.walk() for a in n.args))]
    return [*node.args, *inside]


# Loop peeling and mask elimination: rounds in which a mask holds everywhere are split off without it.
#
# A mask is a comparison of affine index forms. Masks that remain are compared in 32 bits, a thread's own part against a
# constant for each element.


# Peeling: where a mask compares an affine form of the loop's index, scalars and index blocks, it holds for all elements
# up to some index. The rounds before that index become a loop of their own without the mask.


VIEW_OPS = (basic.broadcast_to, shape.reshape)


def peel_masked_loops(function: Function, grid: Sequence[int] | None) -> Function:
    """The function with its loops of asynchronous products peeled where that removes masks."""
    return eliminate_dead_code(LoopPeeler(function, grid).run())


class LoopPeeler:
    """Finds comparisons that hold everywhere, always or in the peeled rounds, and peels loops."""

    def __init__(self, function: Function, grid: Sequence[int] | None) -> None:
        self.function = function
        self.uses = UseDef(function)
        ranges = IntervalAnalysis(self.uses, grid)
        for node in function.body.walk():
            if node.op is control_flow.for_:
                ranges.loop(node)
        found = {n.out: e for n in function.body.walk() if (e := find_excess(self.uses, n)) is not None}
        self.open = {v: e for v, e in found.items() if not is_always_negative(ranges, e, static_shape(v))}
        self.true = set(found) - set(self.open)

    def run(self) -> Function:
        """The function without the masks that hold everywhere, and with its masked loops in two."""
        patterns = RewritePatterns("loop peeling")
        patterns(elementwise.where)(self._drop_mask)
        patterns(control_flow.for_)(self._peel)
        return rewrite_function(self.function, patterns)

    def _drop_mask(self, rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        return args[1] if self._holds(node.args[0]) else None

    def _peel(self, rewriter: Rewriter, node: Node, args: list[Value]) -> tuple[Value, ...] | None:
        bounds = self._bounds(node) if self.uses.block_of(node) is self.function.body else {}
        return self._split(rewriter, node, bounds, args) if bounds else None

    def _holds(self, v: Value) -> bool:
        """Whether a mask is known to hold everywhere."""
        node = self.uses.get(v)
        if node is not None and node.op in VIEW_OPS:
            return self._holds(node.args[0])
        return v in self.true

    def _bounds(self, loop: Node) -> dict[Value, AffineForm]:
        """The comparisons in a loop's body that hold below some index, as affine forms that are negative there."""
        (body,) = loop.regions
        index, made = body.params[0], {v for n in body.walk() for v in n.results} | set(body.params)
        step = self.uses.get(loop.args[2])
        if not any(n.op is async_mma for n in body.nodes) or step is None or step.op is not basic.full:
            return {}
        inside = [v for n in body.nodes for v in n.results if v in self.open]
        known = {v: self.open[v] for v in inside if self.open[v].scalars.get(index) == 1}
        return {v: e for v, e in known.items() if not (made - {index}) & set(e.scalars)}

    def _split(
        self, rewriter: Rewriter, loop: Node, bounds: dict[Value, AffineForm], args: Sequence[Value]
    ) -> tuple[Value, ...]:
        """Split a loop in two; in the first the comparisons hold."""
        lower, upper, step, *state = args
        scalars = IndexArithmetic(rewriter.builder)
        (body,) = loop.regions
        middle = upper
        for v, e in bounds.items():
            others = {rewriter.new(x): c for x, c in e.scalars.items() if x is not body.params[0]}
            middle = scalars.two(
                elementwise.minimum,
                middle,
                scalars.negative(AffineForm(e.upper_bound_of_block(static_shape(v)), others)),
            )
        self.true |= set(bounds)
        first = self._loop(rewriter, loop, [lower, middle, step, *state])
        self.true -= set(bounds)
        return self._loop(rewriter, loop, [scalars.after(lower, middle, step), upper, step, *first])

    def _loop(self, rewriter: Rewriter, loop: Node, args: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(rewriter.copy(loop, args))


class IndexArithmetic:
    """Builds nodes of index arithmetic."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def number(self, value: int) -> Value:
        """A constant."""
        return self.builder.add(basic.full, [], {"shape": (), "value": value, "dtype": int64}).out

    def two(self, op: Any, x: Value, y: Value) -> Value:
        """An op on two scalars."""
        return self.builder.add(op, [x, y], {}).out

    def negative(self, found: AffineForm) -> Value:
        """The negative of an affine form of scalars."""
        total = self.number(-found.constant)
        for v, c in found.scalars.items():
            total = self.two(elementwise.sub, total, self.two(elementwise.mul, v, self.number(c)))
        return total

    def after(self, lower: Value, upper: Value, step: Value) -> Value:
        """The index after a loop from `lower` by `step` has done its rounds before `upper`."""
        rest = self.two(elementwise.maximum, self.two(elementwise.sub, upper, lower), self.number(0))
        more = self.two(elementwise.add, rest, self.two(elementwise.sub, step, self.number(1)))
        rounds = self.two(elementwise.floor_divide, more, step)
        return self.two(elementwise.add, lower, self.two(elementwise.mul, rounds, step))


# Index comparisons in 32 bits: a thread's own part against a constant for each element.


LIMIT_CLAMP = 1 << 30  # exceeds the sums of indices in a block that are compared, so a limit may be clamped to it


narrow_comparisons = RewritePatterns("narrow index comparisons")


def narrow_index_comparisons(function: Function) -> Function:
    """Make each comparison of index blocks against a sum of scalars one op in 32 bits."""
    return eliminate_dead_code(rewrite_function(function, narrow_comparisons))


@narrow_comparisons(*COMPARISON_OPS)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    found = find_excess(rewriter.uses, node)
    if found is None or not found.ramps:
        return None
    shape = static_shape(node.out)
    steps = tuple(found.ramps.get(a - len(shape), 0) for a in range(len(shape)))
    if sum(abs(step) << bit_width(n) for step, n in zip(steps, shape, strict=True)) >= LIMIT_CLAMP:
        return None
    scalars = {rewriter.new(v): c for v, c in found.scalars.items()}
    limit = IndexArithmetic(rewriter.builder).negative(AffineForm(found.constant, scalars))
    return rewriter.add(indices_below, limit, shape=shape, steps=steps)


@emission_rule(indices_below)
def _(ctx: EmissionContext, node: Node) -> None:
    """Subtract the thread's first index from the limit, then compare with the relative index of each register."""
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
