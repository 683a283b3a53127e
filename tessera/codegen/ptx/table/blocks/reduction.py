"""Reduction: a fixed tree over a thread's registers, then shuffles over a warp, then shared memory over warps.

The tree depends on the layout alone, so equal elements give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.codegen.ptx.context import EmissionContext
from tessera.codegen.ptx.layout import LANE_BITS, WARP_THREADS, DistributedLayout, LayoutBit, and_predicates
from tessera.codegen.ptx.ops import element_of_row
from tessera.codegen.ptx.passes.layout_inference import natural_layout_rules, operand_layout_rules, reduction_axes
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks.layout_conversion import read_exchange, shuffle_register, write_exchange
from tessera.codegen.ptx.table.scalars.arithmetic import (
    convert,
    convert_for_storage,
    materialise_operand,
    select_register,
)
from tessera.codegen.ptx.table.scalars.math_functions import ScalarContext, emit
from tessera.codegen.ptx.text.builder import PtxBuilder, ptx_type, typed_literal
from tessera.core.types import DType, bool_, f32, f64, int32, int64
from tessera.ir.core import Node, Value
from tessera.ir.rules import Op
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce
from tessera.ops.tensor.reduce import find_neutral_element

ReductionElement = tuple[str, ...]  # the registers of an element: its value, and for arg-reductions its index
LAST_INDEX = (1 << 62) - 1
MANY_WARP_BITS = 3  # from so many bits of the warp number on, each lane reads the partial result of one warp


@dataclass(frozen=True)
class Combiner:
    """A reduction's operation: the types of an element's parts, how two elements combine, the neutral element."""

    dtypes: tuple[DType, ...]
    join: Callable[[PtxBuilder, ReductionElement, ReductionElement], ReductionElement]
    neutral: tuple[float | bool, ...]

    def constants(self) -> tuple[float | bool | str, ...]:
        """The neutral element as immediates; a bool stays as it is."""
        return tuple(n if d == bool_ else typed_literal(n, d) for n, d in zip(self.neutral, self.dtypes, strict=True))


def make_combiner(op: Op, dtype: DType) -> Combiner:
    """The combiner of a reduction of elements of a type."""
    if op in ARGREDUCE_OPS:
        join = _make_indexed_join(ARGREDUCE_OPS[op], dtype)
        return Combiner((dtype, int64), join, (find_neutral_element(op.__name__, dtype), LAST_INDEX))
    rule = emit.of(ELEMENT_OPS[op])

    def join_values(text: PtxBuilder, a: ReductionElement, b: ReductionElement) -> ReductionElement:
        return (rule(ScalarContext(text, dtype, dtype), a[0], b[0]),)

    return Combiner((dtype,), join_values, (find_neutral_element(op.__name__, dtype),))


ELEMENT_OPS: dict[Op, Op] = {reduce.sum: e.add, reduce.max: e.maximum, reduce.min: e.minimum}
ARGREDUCE_OPS: dict[Op, Op] = {reduce.argmax: e.greater, reduce.argmin: e.less}


def _make_indexed_join(
    better: Op, dtype: DType
) -> Callable[[PtxBuilder, ReductionElement, ReductionElement], ReductionElement]:
    """The better element with its index; of equal elements the first, and NaN before any number."""
    rule, equal = emit.of(better), emit.of(e.equal)

    def join(text: PtxBuilder, a: ReductionElement, b: ReductionElement) -> ReductionElement:
        x, y, scalar = a[0], b[0], ScalarContext(text, dtype, bool_)
        take, tied = rule(scalar, y, x), equal(scalar, y, x)
        if dtype.is_float:
            take, tied = _prefer_nan(text, ptx_type(dtype), x, y, take, tied)
        earlier = text.let("setp.lt.s64", "pred", materialise_operand(text, "b64", b[1]), a[1])
        chosen = text.let("or.pred", "pred", take, text.let("and.pred", "pred", tied, earlier))
        return select_register(text, dtype, chosen, y, x), text.let("selp.b64", "b64", b[1], a[1], chosen)

    return join


def _prefer_nan(text: PtxBuilder, form: str, x: str, y: str, take: str, tied: str) -> tuple[str, str]:
    """Also take `y` where it is NaN and `x` is not; also tied where both are."""
    first, second = (materialise_operand(text, form, each) for each in (x, y))
    second_nan, first_nan = (text.let(f"setp.nan.{form}", "pred", each, each) for each in (second, first))
    only_second = text.let("and.pred", "pred", second_nan, text.let("not.pred", "pred", first_nan))
    both = text.let("and.pred", "pred", second_nan, first_nan)
    return text.let("or.pred", "pred", take, only_second), text.let("or.pred", "pred", tied, both)


@emission_rule(reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)
def _(ctx: EmissionContext, node: Node) -> None:
    x = node.args[0]
    source, dtype = x.type.dtype, _accumulator_type(node)
    held: list[ReductionElement] = [(convert(ctx.text, source, dtype, r),) for r in ctx.values[x]]
    layout, axes = ctx.layout(x), reduction_axes(node)
    if node.op in EXTREMES and dtype in PLACED_TYPES:
        parts = _find_first_places(ctx, node.op, layout, axes[0], [v for (v,) in held], dtype)
    elif node.op in ARGREDUCE_OPS:
        indices = _emit_element_indices(ctx, layout, axes[0])
        held = [(*part, index) for part, index in zip(held, indices, strict=True)]
        parts = TreeReduction(ctx, make_combiner(node.op, dtype), layout, axes).emit(held)
    else:
        combiner = make_combiner(node.op, dtype)
        parts = TreeReduction(ctx, combiner, layout, axes).emit(held)
        if node.op is reduce.sum and dtype.is_float:  # a sum starts at +0: that of -0 is +0
            parts = [combiner.join(ctx.text, part, (str(combiner.constants()[0]),)) for part in parts]
    reduced = layout.reduced(axes, keep=bool(node.attrs["keepdims"]))
    found = [parts[reduced.index[offset]][-1] for offset in ctx.layout(node.out).offsets]
    result_type = int64 if node.op in ARGREDUCE_OPS else dtype
    ctx.values[node.out] = tuple(convert_for_storage(ctx.text, result_type, node.out.type, r) for r in found)  # type: ignore[arg-type]


# The places of extremes: first the extreme, and then the first element that is equal to it. An element costs less so
# than one that carries its index through the tree. NaN is an extreme.


EXTREMES: dict[Op, Op] = {reduce.argmax: reduce.max, reduce.argmin: reduce.min}
PLACED_TYPES = (f32, f64, int32, int64)
NO_PLACE = 1 << 30  # more than any index of a block, and no overflow with that of a thread


def _find_first_places(
    ctx: EmissionContext, op: Op, layout: DistributedLayout, axis: int, values: Sequence[str], dtype: DType
) -> list[ReductionElement]:
    """The index of the first extreme element along an axis, in the order of the reduced layout's registers."""
    text, form = ctx.text, ptx_type(dtype)
    tops = TreeReduction(ctx, make_combiner(EXTREMES[op], dtype), layout, (axis,)).emit([(v,) for v in values])
    groups: dict[tuple[int, ...], list[tuple[int, str]]] = {}
    for value, offset in zip(values, layout.offsets, strict=True):
        groups.setdefault((*offset[:axis], *offset[axis + 1 :]), []).append((offset[axis], value))
    thread, found = ctx.team.thread_offset(layout, axis), list[ReductionElement]()
    for (given,), held in zip(tops, groups.values(), strict=True):
        top, place = materialise_operand(text, form, given), str(NO_PLACE)
        unknown = text.let(f"setp.nan.{form}", "pred", top, top) if dtype.is_float else ""
        for index, value in sorted(held, reverse=True):
            x = materialise_operand(text, form, value)
            if unknown:
                both = text.let(f"setp.nan.and.{form}", "pred", x, x, unknown)
                hit = text.let(f"setp.eq.or.{form}", "pred", x, top, both)
            else:
                hit = text.let(f"setp.eq.{form}", "pred", x, top)
            place = text.let("selp.b32", "b32", str(index), place, hit)
        found.append((text.let("add.s32", "b32", place, thread) if thread != "0" else place,))
    least = Combiner((int32,), lambda text, a, b: (text.let("min.s32", "b32", a[0], b[0]),), (NO_PLACE,))
    parts = TreeReduction(ctx, least, layout, (axis,)).emit_threads(found)
    return [(text.let("cvt.s64.s32", "b64", part[0]),) for part in parts]


# The element at a place of a row: a shuffle from the lane that has it, of the register that its place chooses.


@natural_layout_rules(element_of_row)
def _(inference, node):
    return [inference.find_layout(node.args[0]).reduced((node.out.type.rank - 1,), keep=True)]


@operand_layout_rules(element_of_row)
def _(arranger, node, out):
    return [arranger.inference.find_layout(node.args[0]), out]


@emission_rule(element_of_row)
def _(ctx: EmissionContext, node: Node) -> None:
    x, place = node.args
    layout, axis, dtype = ctx.layout(x), x.type.rank - 1, x.type.dtype  # type: ignore[union-attr]
    reduced, combiner = layout.reduced((axis,), keep=True), make_combiner(reduce.sum, dtype)
    bits = [(i, bit[1]) for i, bit in enumerate(layout.threads) if bit is not None and bit[0] == axis]
    places = [_narrow_place(ctx, place, p) for p in ctx.values[place]]
    read = _shuffle_rows if _is_run_of_lanes(bits) else _add_up_rows
    zero, found = str(combiner.constants()[0]), []
    for index, picked in zip(places, read(ctx, layout, bits, combiner, ctx.values[x], places), strict=True):
        if dtype.is_float:  # a sum starts at +0: that of -0 is +0
            picked = combiner.join(ctx.text, (picked,), (zero,))[0]
        if not node.attrs["inside"]:
            inside = ctx.text.let("setp.lt.u32", "pred", index, layout.shape[axis])
            picked = select_register(ctx.text, dtype, inside, picked, zero)
        found.append(picked)
    ctx.values[node.out] = tuple(found[reduced.index[offset]] for offset in ctx.layout(node.out).offsets)


LAST_PLACE = (1 << 31) - 1


def _narrow_place(ctx: EmissionContext, v: Value, place: str) -> str:
    """A place as a number of 32 bits, which is outside where it was."""
    if v.type.dtype != int64 or not place.startswith("%"):  # type: ignore[union-attr]
        return materialise_operand(ctx.text, "b32", place)
    return ctx.text.let("cvt.u32.u64", "b32", ctx.text.let("min.u64", "b64", place, LAST_PLACE))


def _is_run_of_lanes(bits: Sequence[tuple[int, int]]) -> bool:
    """Whether the bits of the thread number that index a row are neighbours, in a lane's number and in the index."""
    return not bits or (
        len({p - i for i, p in bits}) == 1 and bits[-1][0] - bits[0][0] < len(bits) <= LANE_BITS - bits[0][0]
    )


def _shuffle_rows(
    ctx: EmissionContext, layout: DistributedLayout, bits: Sequence[tuple[int, int]], combiner: Combiner,
    values: Sequence[str], places: Sequence[str],
) -> list[str]:  # fmt: skip
    """The element of each row from its lane, of whose registers the one whose offset has the bits of the place."""
    (dtype,), rows = combiner.dtypes, dict[tuple[int, ...], list[tuple[int, str]]]()
    for value, offset in zip(values, layout.offsets, strict=True):
        rows.setdefault(offset[:-1], []).append((offset[-1], value))
    found = []
    for place, row in zip(places, rows.values(), strict=True):
        held = _choose_register(ctx.text, dtype, row, place)  # all lanes of a row have the same place
        found.append(shuffle_register(ctx.text, dtype, held, "idx", _find_lane(ctx, bits, place)) if bits else held)
    return found


def _find_lane(ctx: EmissionContext, bits: Sequence[tuple[int, int]], place: str) -> str:
    """The lane that has the element at a place of this lane's row."""
    (first, low), count, text = bits[0], len(bits), ctx.text
    lane = text.let("shr.u32", "b32", place, low) if low else place
    if count == LANE_BITS:  # a shuffle reads no further bits
        return lane
    mask = (1 << count) - 1
    lane = text.let("and.b32", "b32", lane, mask)
    lane = text.let("shl.b32", "b32", lane, first) if first else lane
    others = (WARP_THREADS - 1) & ~(mask << first)
    return text.let("or.b32", "b32", lane, ctx.team.hoist(("lanes", others), "and.b32", "b32", ctx.team.thread, others))


def _choose_register(text: PtxBuilder, dtype: DType, parts: Sequence[tuple[int, str]], place: str) -> str:
    """Of registers the one whose offset along a row has the bits of a place: each bit leaves half of them."""
    while len(parts) > 1:
        bit = 1 << (max(n for n, _ in parts).bit_length() - 1)
        held = text.let("setp.ne.u32", "pred", text.let("and.b32", "b32", place, bit), 0)
        high = {n - bit: v for n, v in parts if n & bit}
        parts = [(n, select_register(text, dtype, held, high[n], v)) for n, v in parts if not n & bit]
    return parts[0][1]


def _add_up_rows(
    ctx: EmissionContext, layout: DistributedLayout, bits: Sequence[tuple[int, int]], combiner: Combiner,
    values: Sequence[str], places: Sequence[str],
) -> list[str]:  # fmt: skip
    """The sums of rows whose other elements are 0."""
    axis, text, (zero,) = len(layout.shape) - 1, ctx.text, combiner.constants()
    thread, reduced, masked = ctx.team.thread_offset(layout, axis), layout.reduced((axis,), keep=True), []
    for value, offset in zip(values, layout.offsets, strict=True):
        row, own = (*offset[:axis], 0), text.let("add.s32", "b32", thread, offset[axis])
        hit = text.let("setp.eq.u32", "pred", own, places[reduced.index[row]])
        masked.append((select_register(text, combiner.dtypes[0], hit, value, str(zero)),))
    return [part for (part,) in TreeReduction(ctx, combiner, layout, (axis,)).emit(masked)]


def _accumulator_type(node: Node) -> DType:
    """The type in which elements combine."""
    type, out = node.args[0].type, node.out.type.dtype
    if node.op in ARGREDUCE_OPS and type.dtype.is_float and type.dtype.bits < 32:  # type: ignore[union-attr]
        return f32
    if node.op is not reduce.sum:
        return type.dtype
    return type.accumulate if out.is_float else out  # type: ignore[union-attr]


def _emit_element_indices(ctx: EmissionContext, layout: DistributedLayout, axis: int) -> list[str]:
    """The index along an axis of the element in each register."""
    thread = ctx.team.thread_offset(layout, axis)
    offsets = [offset[axis] for offset in layout.offsets]
    if thread == "0":
        return [str(n) for n in offsets]
    wide = ctx.team.hoist(("wide", thread), "cvt.u64.u32", "b64", thread)
    known = {n: ctx.text.let("add.s64", "b64", wide, n) for n in dict.fromkeys(offsets)}
    return [known[n] for n in offsets]


@dataclass(frozen=True)
class ExchangeLayouts:
    """How the partial results of warps are written and read; `lanes`: the bits of the lanes that share the reads."""

    writing: DistributedLayout
    reading: DistributedLayout
    by_columns: bool  # the results of one warp are neighbours, rather than those of all warps for one element
    lanes: Sequence[int]


class TreeReduction:
    """One reduction of a block along axes."""

    def __init__(
        self, ctx: EmissionContext, combiner: Combiner, layout: DistributedLayout, axes: Sequence[int]
    ) -> None:
        self.ctx, self.combiner, self.layout, self.axes = ctx, combiner, layout, axes

    def emit(self, held: Sequence[ReductionElement]) -> list[ReductionElement]:
        """Reduce the registers of a block; the results are in the order of the reduced layout's registers."""
        return self.emit_threads(self._reduce_registers(self._neutralise_padding(held)))

    def emit_threads(self, parts: list[ReductionElement]) -> list[ReductionElement]:
        """Reduce over threads what each has reduced of its registers."""
        parts = self._reduce_lanes(parts, self._reduced_bits(0, LANE_BITS))
        return self._reduce_warps(parts) if self._reduced_bits(LANE_BITS, None) else parts

    def _neutralise_padding(self, held: Sequence[ReductionElement]) -> list[ReductionElement]:
        """Replace elements past the block's end along the axes by the neutral element."""
        if not any(self.layout.is_padded(a) for a in self.axes):
            return list(held)
        team, text = self.ctx.team, self.ctx.text
        neutral = [team.constant_predicate(bool(n)) if isinstance(n, bool) else n for n in self.combiner.constants()]
        found = []
        for part, offset in zip(held, self.layout.offsets, strict=True):
            bounds = (team.axis_predicate(self.layout, a, offset[a]) for a in self.axes)
            inside = and_predicates(text, *(p for p in bounds if p))
            chosen = zip(self.combiner.dtypes, part, neutral, strict=True)
            found.append(tuple(select_register(text, d, inside, x, str(n)) for d, x, n in chosen) if inside else part)
        return found

    def _reduce_registers(self, held: Sequence[ReductionElement]) -> list[ReductionElement]:
        """Reduce the registers of each thread, for each register of the result."""
        groups: dict[tuple[int, ...], list[ReductionElement]] = {}
        for part, offset in zip(held, self.layout.offsets, strict=True):
            rest = tuple(0 if a in self.axes else n for a, n in enumerate(offset))
            groups.setdefault(rest, []).append(part)
        return [self._reduce_tree(parts) for parts in groups.values()]

    def _reduce_tree(self, parts: list[ReductionElement]) -> ReductionElement:
        """Combine the first half with the second, until one element is left."""
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [self._join(a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
        return parts[0]

    def _join(self, a: ReductionElement, b: ReductionElement) -> ReductionElement:
        return self.combiner.join(self.ctx.text, a, b)

    def _reduced_bits(self, first: int, last: int | None) -> list[int]:
        """The bits of the thread number, in a range, that index the axes."""
        bits = list(enumerate(self.layout.threads))[first:last]
        return [i for i, bit in bits if bit is not None and bit[0] in self.axes]

    def _reduce_lanes(self, parts: list[ReductionElement], bits: Sequence[int]) -> list[ReductionElement]:
        """Reduce over lanes that differ in some bits of their number (butterfly shuffles); all get the result."""
        for i in bits:
            others = [
                tuple(
                    shuffle_register(self.ctx.text, d, x, "bfly", 1 << i)
                    for d, x in zip(self.combiner.dtypes, part, strict=True)
                )
                for part in parts
            ]
            parts = [self._join(a, b) for a, b in zip(parts, others, strict=True)]
        return parts

    def _reduce_warps(self, parts: list[ReductionElement]) -> list[ReductionElement]:
        """Reduce over warps through the exchange buffer, which has one more axis for the warps' partial results."""
        layouts = self._make_exchange_layouts()
        columns = []
        for i, dtype in enumerate(self.combiner.dtypes):
            write_exchange(
                self.ctx, dtype, [part[i] for part in parts], layouts.writing, math.prod(layouts.writing.shape)
            )
            columns.append(read_exchange(self.ctx, dtype, layouts.reading))
        rows: list[ReductionElement] = list(zip(*columns, strict=True))
        step = len(parts) if layouts.by_columns else 1
        warps = len(rows) // len(parts)
        firsts = range(len(parts)) if layouts.by_columns else range(0, len(rows), warps)
        reduced = [self._reduce_tree(rows[i : i + warps * step : step]) for i in firsts]
        return self._reduce_lanes(reduced, layouts.lanes)

    def _make_exchange_layouts(self) -> ExchangeLayouts:
        """The layouts in which partial results are written and read.

        Each thread reads all of them; where there are many, each lane reads one. Where lanes have results of their own,
        those of a warp are neighbours in memory, so that lanes use banks of their own.
        """
        rest, warp_bits = self.layout.reduced(self.axes, keep=False), self._reduced_bits(LANE_BITS, None)
        by_columns = any(rest.threads[:LANE_BITS])
        shift, axis = int(by_columns), 0 if by_columns else len(rest.shape)
        bits: list[LayoutBit] = [(axis, n) for n in range(len(warp_bits))]
        shape = list(rest.shape)
        shape.insert(axis, 1 << len(warp_bits))
        registers = tuple((a + shift, n) for a, n in rest.registers)
        held = tuple(bit and (bit[0] + shift, bit[1]) for bit in rest.threads)
        added = dict(zip(warp_bits, bits, strict=True))
        writing = DistributedLayout(tuple(shape), registers, tuple(added.get(i, bit) for i, bit in enumerate(held)))
        if MANY_WARP_BITS <= len(bits) <= LANE_BITS and not any(held[: len(bits)]):
            reading = DistributedLayout(tuple(shape), registers, (*bits, *held[len(bits) :]))
            return ExchangeLayouts(writing, reading, by_columns, range(len(bits)))
        order = (*registers, *bits) if by_columns else (*bits, *registers)
        return ExchangeLayouts(writing, DistributedLayout(tuple(shape), order, held), by_columns, ())
