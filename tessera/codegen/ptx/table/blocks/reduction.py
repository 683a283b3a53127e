"""Reductions: a fixed tree over a thread's registers, then over a warp by shuffles, then over warps through memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.codegen.ptx.context import EmissionContext
from tessera.codegen.ptx.layout import DistributedLayout, LayoutBit
from tessera.codegen.ptx.passes.layout_inference import reduction_axes
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks.layout_conversion import read_exchange, shuffle_register, write_exchange
from tessera.codegen.ptx.table.scalars.arithmetic import ScalarContext, emit
from tessera.codegen.ptx.table.scalars.conversion import convert, convert_for_storage
from tessera.codegen.ptx.table.scalars.packing import materialise_operand, select_register
from tessera.codegen.ptx.text.builder import PtxBuilder
from tessera.codegen.ptx.text.register_types import ptx_type, typed_literal
from tessera.codegen.ptx.text.thread_team import and_predicates
from tessera.core.types import DType, bool_, int64
from tessera.ir.core import Node
from tessera.ir.rules import Op
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce

# How two elements are combined by each kind of reduction, and what leaves the other as it is.


ReductionElement = tuple[str, ...]  # an element: its register, and for arg-reductions that of its place
LAST_INDEX = (1 << 62) - 1


@dataclass(frozen=True)
class Combiner:
    """A reduction: the types of an element's parts, what joins two, and the part that changes nothing."""

    dtypes: tuple[DType, ...]
    join: Callable[[PtxBuilder, ReductionElement, ReductionElement], ReductionElement]
    neutral: tuple[float | bool, ...]

    def constants(self) -> tuple[float | bool | str, ...]:
        """The neutral part as immediates; a bool as it is."""
        return tuple(n if d == bool_ else typed_literal(n, d) for n, d in zip(self.neutral, self.dtypes, strict=True))


def make_combiner(op: Op, dtype: DType) -> Combiner:
    """The way of combining of a reduction of elements of a type."""
    if op in ARGREDUCE_OPS:
        return Combiner(
            (dtype, int64), _combine_with_index(ARGREDUCE_OPS[op], dtype), (NEUTRAL_ELEMENTS[op](dtype), LAST_INDEX)
        )
    row = emit.of(ELEMENT_OPS[op])

    def join(text: PtxBuilder, a: ReductionElement, b: ReductionElement) -> ReductionElement:
        return (row(ScalarContext(text, dtype, dtype), a[0], b[0]),)

    return Combiner((dtype,), join, (NEUTRAL_ELEMENTS[op](dtype),))


def _zero(dtype: DType) -> float | bool:
    return 0


def _lowest(dtype: DType) -> float | bool:
    if dtype.is_float:
        return -math.inf
    return False if dtype == bool_ else 0 if dtype.kind == "uint" else -(1 << (dtype.bits - 1))


def _highest(dtype: DType) -> float | bool:
    if dtype.is_float:
        return math.inf
    return True if dtype == bool_ else (1 << dtype.bits) - 1 if dtype.kind == "uint" else (1 << (dtype.bits - 1)) - 1


ELEMENT_OPS: dict[Op, Op] = {reduce.sum: e.add, reduce.max: e.maximum, reduce.min: e.minimum}
ARGREDUCE_OPS: dict[Op, Op] = {reduce.argmax: e.greater, reduce.argmin: e.less}
NEUTRAL_ELEMENTS: dict[Op, Callable[[DType], float | bool]] = {
    reduce.sum: _zero, reduce.max: _lowest, reduce.argmax: _lowest, reduce.min: _highest, reduce.argmin: _highest,
}  # fmt: skip


def _combine_with_index(
    better: Op, dtype: DType
) -> Callable[[PtxBuilder, ReductionElement, ReductionElement], ReductionElement]:
    """The better element with its place; of equal ones the first, and a NaN before any number."""
    row, same = emit.of(better), emit.of(e.equal)

    def join(text: PtxBuilder, a: ReductionElement, b: ReductionElement) -> ReductionElement:
        x, y, spot = a[0], b[0], ScalarContext(text, dtype, bool_)
        take, tied = row(spot, y, x), same(spot, y, x)
        if dtype.is_float:
            take, tied = _prefer_nan(text, ptx_type(dtype), x, y, take, tied)
        earlier = text.let("setp.lt.s64", "pred", materialise_operand(text, "b64", b[1]), a[1])
        chosen = text.let("or.pred", "pred", take, text.let("and.pred", "pred", tied, earlier))
        return select_register(text, dtype, chosen, y, x), text.let("selp.b64", "b64", b[1], a[1], chosen)

    return join


def _prefer_nan(text: PtxBuilder, form: str, x: str, y: str, take: str, tied: str) -> tuple[str, str]:
    """Taken also if `y` is NaN and `x` is not; tied also if both are."""
    kind = form
    first, second = (materialise_operand(text, kind, each) for each in (x, y))
    strange, other = (text.let(f"setp.nan.{form}", "pred", each, each) for each in (second, first))
    fresh = text.let("and.pred", "pred", strange, text.let("not.pred", "pred", other))
    both = text.let("and.pred", "pred", strange, other)
    return text.let("or.pred", "pred", take, fresh), text.let("or.pred", "pred", tied, both)


# Reductions: over a thread's registers, then between the threads of a warp, then between warps through memory.
#
# The tree is fixed: the same elements in the same places give the same bits.


LANE_BITS = 5  # bits of a thread's number that tell the threads of a warp apart
MANY_WARP_BITS = 3  # bits that tell warps apart from which on each lane reads one warp's result


@emission_rule(reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)
def _(ctx: EmissionContext, node: Node) -> None:
    x = node.args[0]
    source, dtype = x.type.dtype, _accumulator_type(node)
    combine = make_combiner(node.op, dtype)
    held: list[ReductionElement] = [(convert(ctx.text, source, dtype, r),) for r in ctx.values[x]]
    layout, axes = ctx.layout(x), reduction_axes(node)
    if node.op in ARGREDUCE_OPS:
        held = [(*part, place) for part, place in zip(held, _element_indices(ctx, layout, axes[0]), strict=True)]
    parts = TreeReduction(ctx, combine, layout, axes).run(held)
    ours = ctx.layout(node.out)
    kept = layout.reduced(axes, keep=False) if not node.attrs["keepdims"] else layout.reduced(axes, keep=True)
    found = [parts[kept.index[place]][-1] for place in ours.offsets]
    made = int64 if node.op in ARGREDUCE_OPS else dtype
    ctx.values[node.out] = tuple(convert_for_storage(ctx.text, made, node.out.type, r) for r in found)  # type: ignore[arg-type]


def _accumulator_type(node: Node) -> DType:
    """The type that elements are combined in."""
    type, out = node.args[0].type, node.out.type.dtype
    if node.op is not reduce.sum:
        return type.dtype
    return type.accumulate if out.is_float else out  # type: ignore[union-attr]


def _element_indices(ctx: EmissionContext, layout: DistributedLayout, axis: int) -> list[str]:
    """The place along an axis of the element in each register."""
    place = ctx.team.thread_offset(layout, axis)
    if place == "0":
        return [str(offset[axis]) for offset in layout.offsets]
    wide = ctx.team.hoist(("wide", place), "cvt.u64.u32", "b64", place)
    known = {n: ctx.text.let("add.s64", "b64", wide, n) for n in {o[axis]: None for o in layout.offsets}}
    return [known[offset[axis]] for offset in layout.offsets]


class TreeReduction:
    """One reduction of a block in a layout along axes."""

    def __init__(self, ctx: EmissionContext, combine: Combiner, layout: DistributedLayout, axes: Sequence[int]) -> None:
        self.ctx, self.combine, self.layout, self.axes = ctx, combine, layout, axes

    def run(self, held: Sequence[ReductionElement]) -> list[ReductionElement]:
        """The results, in the order of the reduced layout's registers."""
        parts = self._registers(self._filled(held))
        parts = self._lanes(parts)
        return self._warps(parts) if self._across(LANE_BITS, None) else parts

    def _filled(self, held: Sequence[ReductionElement]) -> list[ReductionElement]:
        """Places past the block's end along the axes hold what changes nothing."""
        if not any(self.layout.is_padded(a) for a in self.axes):
            return list(held)
        team, text = self.ctx.team, self.ctx.text
        neutral = [team.constant_predicate(bool(n)) if isinstance(n, bool) else n for n in self.combine.constants()]
        found = []
        for part, place in zip(held, self.layout.offsets, strict=True):
            inside = and_predicates(
                text, *(p for a in self.axes if (p := team.axis_predicate(self.layout, a, place[a])))
            )
            chosen = zip(self.combine.dtypes, part, neutral, strict=True)
            found.append(tuple(select_register(text, d, inside, x, str(n)) for d, x, n in chosen) if inside else part)
        return found

    def _registers(self, held: Sequence[ReductionElement]) -> list[ReductionElement]:
        """What a thread holds combined by halves, for each register of the result."""
        groups: dict[tuple[int, ...], list[ReductionElement]] = {}
        for part, place in zip(held, self.layout.offsets, strict=True):
            rest = tuple(0 if a in self.axes else n for a, n in enumerate(place))
            groups.setdefault(rest, []).append(part)
        return [self._tree(parts) for parts in groups.values()]

    def _tree(self, parts: list[ReductionElement]) -> ReductionElement:
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [self.join(a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
        return parts[0]

    def join(self, a: ReductionElement, b: ReductionElement) -> ReductionElement:
        """Two parts combined."""
        return self.combine.join(self.ctx.text, a, b)

    def _across(self, first: int, last: int | None) -> list[int]:
        """Bits of the thread's number that stand for places along the axes."""
        bits = list(enumerate(self.layout.threads))[first:last]
        return [i for i, bit in bits if bit is not None and bit[0] in self.axes]

    def _lanes(self, parts: list[ReductionElement]) -> list[ReductionElement]:
        return self._shuffled(parts, self._across(0, LANE_BITS))

    def _shuffled(self, parts: list[ReductionElement], bits: Sequence[int]) -> list[ReductionElement]:
        """The parts of lanes apart by these bits of their number combined, the same in all of them."""
        for i in bits:
            others = [
                tuple(shuffle_register(self.ctx.text, d, x, "bfly", 1 << i) for d, x in self._typed(p)) for p in parts
            ]
            parts = [self.join(a, b) for a, b in zip(parts, others, strict=True)]
        return parts

    def _typed(self, part: ReductionElement) -> list[tuple[DType, str]]:
        return list(zip(self.combine.dtypes, part, strict=True))

    def _warps(self, parts: list[ReductionElement]) -> list[ReductionElement]:
        """Each warp's results to memory, along one more axis; all of them read by every thread, or one by each lane."""
        writing, reading, lanes = self._exchanged()
        columns = []
        for place, dtype in enumerate(self.combine.dtypes):
            write_exchange(self.ctx, dtype, [p[place] for p in parts], writing, _element_count(writing))
            columns.append(read_exchange(self.ctx, dtype, reading))
        warps = 1 if lanes else writing.shape[-1]
        rows: list[ReductionElement] = list(zip(*columns, strict=True))
        return self._shuffled([self._tree(rows[i : i + warps]) for i in range(0, len(rows), warps)], lanes)

    def _exchanged(self) -> tuple[DistributedLayout, DistributedLayout, Sequence[int]]:
        """The layouts of the warps' results as they are written and as they are read, and the lanes that share them."""
        rest = self.layout.reduced(self.axes, keep=True)
        across, last = self._across(LANE_BITS, None), len(rest.shape)
        shape = (*rest.shape, 1 << len(across))
        bits: list[LayoutBit] = [(last, n) for n in range(len(across))]
        given = dict(zip(across, bits, strict=True))
        threads = tuple(given.get(i, bit) for i, bit in enumerate(rest.threads))
        writing = DistributedLayout(shape, rest.registers, threads)
        if len(bits) >= MANY_WARP_BITS and len(bits) <= LANE_BITS and not any(rest.threads[: len(bits)]):
            return (
                writing,
                DistributedLayout(shape, rest.registers, (*bits, *rest.threads[len(bits) :])),
                range(len(bits)),
            )
        return writing, DistributedLayout(shape, (*bits, *rest.registers), rest.threads), ()


def _element_count(layout: DistributedLayout) -> int:
    total = 1
    for n in layout.shape:
        total *= n
    return total
