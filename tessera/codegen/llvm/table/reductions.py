"""Reductions: loops over the reduced axes, in the order of memory, that carry vector accumulators, combined in a fixed
order.

An argmax or argmin carries a value and its index.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tessera.codegen.contract import get_tensor_type, static_shape
from tessera.codegen.llvm.passes.bufferisation import is_block
from tessera.codegen.llvm.table.emission import RowTypes, pointwise_row, statement_rule
from tessera.codegen.llvm.table.index_sets import strip_mine
from tessera.codegen.llvm.table.loop_fusion import (
    allocate_block,
    choose_vector_width,
    emit_element,
    emit_scalar_loops,
    make_ramp_index,
    round_to_storage,
    widen_lane,
)
from tessera.codegen.llvm.text.builder import (
    ZERO_LANE,
    LaneIndex,
    LaneKind,
    LaneValue,
    LineSection,
    LlvmBuilder,
    LoopBody,
    LoopBuilder,
    RegisterType,
    format_literal,
    get_register_type,
)
from tessera.codegen.llvm.text.memory import StridedMemRef, fit_vector_width, store_lane
from tessera.core.types import DType, TensorType, int32, int64
from tessera.ir.core import Node, Value
from tessera.ir.rules import Op, Rules
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, elementwise, reduce, shape

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


# The axis of the block at hand that each axis of a value is; None where it is none of them.
AxisMap = tuple[int | None, ...]
# rule(node, axes) gives the axis map of the first operand of a node that moves elements.
movement_rules = Rules("llvm axis map")


def count_gathers(kernel: LlvmKernelContext, v: Value) -> Counter[int]:
    """For each axis of a value of rank > 0, the number of reads that are gathers where lanes run along it.

    A read is none if it is contiguous along the axis, or does not depend on it.
    """
    found: Counter[int] = Counter()
    seen: set[tuple[Value, AxisMap]] = set()
    work: list[tuple[Value, AxisMap]] = [(v, tuple(range(len(static_shape(v.type)))))]
    while work:
        value, axes = work.pop()
        if (value, axes) in seen or not axes or value in kernel.scalars:
            continue
        seen.add((value, axes))
        node = kernel.producers.get(value)
        if value in kernel.buffers or (node is not None and node.op is tile.load):
            found.update(_find_strided_axes(value, axes))
        elif node is not None:
            work += [(x, _map_operand(node, x, axes)) for x in node.args]
    return found


def _find_strided_axes(value: Value, axes: AxisMap) -> list[int]:
    """The axes along which the memory of a value is strided: all but the last of those of more than one element."""
    long = [a for a, n in zip(axes, static_shape(value.type), strict=True) if n != 1]
    return [a for a in long[:-1] if a is not None]


def _map_operand(node: Node, x: Value, axes: AxisMap) -> AxisMap:
    rule = movement_rules.get(node.op)
    if rule is not None:
        return rule(node, axes)  # type: ignore[no-any-return]
    return axes if node.op.pointwise and static_shape(x.type) == static_shape(node.out.type) else ()


@movement_rules(shape.permute)
def _(node, axes):
    order: Sequence[int] = node.attrs["axes"]
    return tuple(axes[order.index(a)] for a in range(len(order)))


@movement_rules(basic.broadcast_to)
def _(node, axes):
    return axes[len(axes) - node.args[0].type.rank :]


@movement_rules(shape.reshape)
def _(node, axes):
    before, after = node.args[0].type.shape, node.out.type.shape
    if [n for n in before if n != 1] != [n for n in after if n != 1]:
        return ()
    long = iter(a for a, n in zip(axes, after, strict=True) if n != 1)
    return tuple(None if n == 1 else next(long) for n in before)


# Combiners: how two partial results become one.


ReductionState = tuple[str, ...]


class ReductionCombiner(Protocol):
    """The state of a reduction: its registers, their initial values, and how two states are combined."""

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element type of each register."""
        ...

    @property
    def element(self) -> DType:
        """The type of the elements that are combined."""
        ...

    @property
    def identity(self) -> tuple[str, ...]:
        """The initial value of each register."""
        ...

    def begin(self, text: LlvmBuilder, width: int, element: str) -> ReductionState:
        """The registers of elements, but for their indices."""
        ...

    def finish(self, text: LlvmBuilder, width: int, state: ReductionState) -> tuple[str, DType]:
        """The result of a state, and its type."""
        ...

    def combine(self, text: LlvmBuilder, width: int, a: ReductionState, b: ReductionState) -> ReductionState:
        """The combination of two states."""
        ...


class PlainStates:
    """States whose first register has the elements, and whose last one the results."""

    dtypes: tuple[DType, ...]
    element: DType

    def begin(self, text: LlvmBuilder, width: int, element: str) -> ReductionState:
        """The registers of elements, but for their indices."""
        return (element,)

    def finish(self, text: LlvmBuilder, width: int, state: ReductionState) -> tuple[str, DType]:
        """The result of a state, and its type."""
        return state[-1], self.dtypes[-1]


class ScalarCombiner(PlainStates):
    """A sum, maximum or minimum: one register."""

    def __init__(self, op: Op, dtype: DType, identity: Any) -> None:
        self.op, self.element = op, dtype
        self.dtypes = (dtype,)
        self.identity = (format_literal(get_register_type(dtype).element, identity),)

    def combine(self, text: LlvmBuilder, width: int, a: ReductionState, b: ReductionState) -> ReductionState:
        """The combination of two states."""
        d = text.new_name()
        text.lines(
            pointwise_row.of(self.op)(RowTypes(get_register_type(self.dtypes[0], width), self.dtypes[0]), d, a[0], b[0])
        )
        return (d,)


class ExtremeBitsCombiner:
    """A maximum or minimum of floats, by their bits: as signed integers the largest, as unsigned ones both extremes.

    Positive floats are ordered as their bits, negative ones the other way round. Three plain instructions an element
    replace the comparisons, selections and tests of signs of `llvm.maximum`; NaN has the largest bits of its sign.
    """

    def __init__(self, larger: bool, dtype: DType) -> None:
        self.larger, self.element = larger, dtype
        self.dtypes: tuple[DType, ...] = (int32, int32, int32)
        self.identity = (str(NEGATIVE_INFINITY if larger else POSITIVE_INFINITY),) * 3

    def begin(self, text: LlvmBuilder, width: int, element: str) -> ReductionState:
        """The bits of elements, three times."""
        t = get_register_type(self.element, width)
        return (text.let(f"bitcast {t} {element} to {t.integer}"),) * 3

    def combine(self, text: LlvmBuilder, width: int, a: ReductionState, b: ReductionState) -> ReductionState:
        """The combination of two states."""
        t = get_register_type(int32, width)
        names = ("smax", "umin", "umax")
        parts = zip(names, a, b, strict=True)
        return tuple(text.let(f"call {t} @llvm.{name}.{t.suffix}({t} {x}, {t} {y})") for name, x, y in parts)

    def finish(self, text: LlvmBuilder, width: int, state: ReductionState) -> tuple[str, DType]:
        """The result: of both signs the one that is larger (or smaller), NaN if there is one."""
        (high, least, most), t = state, get_register_type(int32, width)
        nan = text.let(f"icmp sgt {t} {high}, {t.const(POSITIVE_INFINITY)}")
        other = text.let(f"icmp ugt {t} {most}, {t.const(NEGATIVE_INFINITY)}")
        some = text.let(f"or {t.truth} {nan}, {other}")
        outer = high if self.larger else most
        signed = text.let(f"icmp {'sge' if self.larger else 'slt'} {t} {outer}, {t.const(0)}")
        bits = text.let(f"select {t.truth} {signed}, {t} {outer}, {t} {least}")
        bits = text.let(f"select {t.truth} {some}, {t} {t.const(QUIET_NAN)}, {t} {bits}")
        to = get_register_type(self.element, width)
        return text.let(f"bitcast {t} {bits} to {to}"), self.element


POSITIVE_INFINITY, QUIET_NAN = 0x7F800000, 0x7FC00000
NEGATIVE_INFINITY = -0x00800000  # 0xFF800000, signed
MIN_BITS_ELEMENTS = 8  # of fewer, the end costs more than it saves


class ArgReduceCombiner(PlainStates):
    """An argmax or argmin: a value and its index; the first of equal values, and NaN before all others."""

    def __init__(self, larger: bool, dtype: DType) -> None:
        self.larger, self.element = larger, dtype
        self.dtypes = (dtype, int64)
        first = format_literal(get_register_type(dtype).element, get_lowest(dtype) if larger else get_highest(dtype))
        self.identity = (first, str(2**63 - 1))

    def combine(self, text: LlvmBuilder, width: int, a: ReductionState, b: ReductionState) -> ReductionState:
        """The combination of two states."""
        t, i = (get_register_type(d, width) for d in self.dtypes)
        selected = self._emit_selection(text, t, i, a, b)
        return tuple(
            text.let(f"select {t.truth} {selected}, {kind} {y}, {kind} {x}")
            for kind, x, y in zip((t, i), a, b, strict=True)
        )

    def _emit_selection(
        self, text: LlvmBuilder, t: RegisterType, i: RegisterType, a: ReductionState, b: ReductionState
    ) -> str:
        """Whether `b` is selected: more extreme, or equal and of lower index."""
        m = t.truth
        better, same = (
            self._compare_floats(text, t, a[0], b[0]) if t.is_float else self._compare_integers(text, t, a[0], b[0])
        )
        lower = text.let(f"icmp slt {i} {b[1]}, {a[1]}")
        tie = text.let(f"and {m} {same}, {lower}")
        return text.let(f"or {m} {better}, {tie}")

    def _compare_integers(self, text: LlvmBuilder, t: RegisterType, x: str, y: str) -> tuple[str, str]:
        sign = "s" if self.dtypes[0].kind == "int" else "u"
        word = f"{sign}gt" if self.larger else f"{sign}lt"
        return text.let(f"icmp {word} {t} {y}, {x}"), text.let(f"icmp eq {t} {y}, {x}")

    def _compare_floats(self, text: LlvmBuilder, t: RegisterType, x: str, y: str) -> tuple[str, str]:
        m = t.truth
        more_extreme = text.let(f"fcmp {'ogt' if self.larger else 'olt'} {t} {y}, {x}")
        nan_x, nan_y = (text.let(f"fcmp uno {t} {z}, {z}") for z in (x, y))
        only_y_nan = text.let(f"icmp ugt {m} {nan_y}, {nan_x}")
        equal = text.let(f"fcmp oeq {t} {y}, {x}")
        both = text.let(f"and {m} {nan_x}, {nan_y}")
        return text.let(f"or {m} {more_extreme}, {only_y_nan}"), text.let(f"or {m} {equal}, {both}")


def get_lowest(dtype: DType) -> Any:
    """The identity of a maximum."""
    return -math.inf if dtype.is_float else -(1 << (dtype.bits - 1)) if dtype.kind == "int" else 0


def get_highest(dtype: DType) -> Any:
    """The identity of a minimum."""
    if dtype.is_float:
        return math.inf
    return (1 << (dtype.bits - (dtype.kind == "int"))) - 1


def find_combiner(op: Op, type: TensorType, count: int) -> ReductionCombiner:
    """The combiner of an op on blocks of a type, for results of so many elements each."""
    if op in (reduce.max, reduce.min) and count >= MIN_BITS_ELEMENTS:
        if get_register_type(type.dtype).element == "float":
            return ExtremeBitsCombiner(op is reduce.max, type.dtype)
    return COMBINERS[op](type)


def _make_sum_combiner(type: TensorType) -> ReductionCombiner:
    # From +0, as NumPy: the sum of zeros is +0 whatever their signs.
    return (
        ScalarCombiner(elementwise.add, type.accumulate, 0.0)
        if type.dtype.is_float
        else ScalarCombiner(elementwise.add, int64, 0)
    )


COMBINERS: dict[Op, Callable[[TensorType], ReductionCombiner]] = {
    reduce.sum: _make_sum_combiner,
    reduce.max: lambda type: ScalarCombiner(elementwise.maximum, type.dtype, get_lowest(type.dtype)),
    reduce.min: lambda type: ScalarCombiner(elementwise.minimum, type.dtype, get_highest(type.dtype)),
    reduce.argmax: lambda type: ArgReduceCombiner(True, type.dtype),
    reduce.argmin: lambda type: ArgReduceCombiner(False, type.dtype),
}


def combine_tree(
    text: LlvmBuilder, combiner: ReductionCombiner, width: int, states: Sequence[ReductionState]
) -> ReductionState:
    """States combined as a tree, neighbours first."""
    while len(states) > 1:
        pairs = zip(states[::2], states[1::2], strict=False)
        odd = [states[-1]] if len(states) % 2 else []
        states = [*(combiner.combine(text, width, a, b) for a, b in pairs), *odd]
    return states[0]


def combine_across_lanes(
    text: LlvmBuilder, combiner: ReductionCombiner, width: int, state: ReductionState
) -> ReductionState:
    """The lanes of a state combined, the upper half onto the lower half."""
    while width > 1:
        half = width // 2
        low, high = (
            tuple(
                _extract_half(text, get_register_type(d, width), x, start, half)
                for d, x in zip(combiner.dtypes, state, strict=True)
            )
            for start in (0, half)
        )
        state, width = combiner.combine(text, half, low, high), half
    return state


def _extract_half(text: LlvmBuilder, t: RegisterType, x: str, start: int, count: int) -> str:
    if count == 1:
        return text.let(f"extractelement {t} {x}, i64 {start}")
    picks = ", ".join(f"i32 {start + i}" for i in range(count))
    return text.let(f"shufflevector {t} {x}, {t} poison, <{count} x i32> <{picks}>")


# Emission of reductions.


ACCUMULATOR_COUNT = 4  # independent accumulators hide the latency of an addition
LANE_REGISTERS, MAX_LANE_REGISTERS = 4, 8  # of results computed together where lanes have their own; of a whole axis


class LlvmReductionEmitter:
    """Emits one reduction: its axes, its combiner and the memory of its results."""

    def __init__(self, kernel: LlvmKernelContext, node: Node) -> None:
        self.kernel, self.node, self.x = kernel, node, node.args[0]
        self.shape = static_shape(self.x.type)
        axis = node.attrs["axis"]
        listed = axis if isinstance(axis, tuple) else (axis,)
        self.reduced = sorted(a % self.x.type.rank for a in listed) if self.shape else []
        count = math.prod(self.shape[a] for a in self.reduced)
        self.combiner: ReductionCombiner = find_combiner(node.op, get_tensor_type(self.x), count)
        self.target: StridedMemRef | None = allocate_block(kernel, node.out) if is_block(node.out) else None
        self.width = choose_vector_width(kernel, *self.combiner.dtypes[:1])

    def register_types(self, width: int) -> list[RegisterType]:
        """The register types of a state."""
        return [get_register_type(d, width) for d in self.combiner.dtypes]

    def initial_state(self, width: int) -> ReductionState:
        """The state before any element."""
        return tuple(
            name if width == 1 else f"splat ({t.element} {name})"
            for t, name in zip(self.register_types(width), self.combiner.identity, strict=True)
        )

    def load_state(self, body: LoopBody, index: LaneIndex) -> ReductionState:
        """The state of the elements at an index."""
        t = self.register_types(body.width)
        element = self.combiner.element
        value = widen_lane(body, self.x.type.dtype, element, emit_element(body, self.x, index))
        own = body.broadcast_lane(value, get_register_type(element, body.width))
        names = self.combiner.begin(body.text, body.width, own)
        if len(names) < len(t):
            names = (*names, *(body.broadcast_lane(index[a], t[-1]) for a in self.reduced))
        if body.mask is None:
            return names
        return tuple(
            body.text.let(f"select {kind.truth} {body.mask}, {kind} {x}, {kind} {none}")
            for kind, x, none in zip(t, names, self.initial_state(body.width), strict=True)
        )

    def accumulate(self, body: LoopBody, index: LaneIndex, state: ReductionState) -> ReductionState:
        """A state combined with the elements at an index."""
        return self.combiner.combine(self.kernel.text, body.width, state, self.load_state(body, index))

    def store_result(self, body: LoopBody, index: LaneIndex, state: ReductionState) -> None:
        """Store a result, or bind a scalar one."""
        name, wide = self.combiner.finish(body.text, body.width, state)
        lane = LaneValue(name, LaneKind.INVARIANT if body.width == 1 else LaneKind.VARYING)
        lane = round_to_storage(body, get_tensor_type(self.node.out), wide, lane)
        if self.target is None:
            self.kernel.scalars[self.node.out] = lane.name
            return
        kept = self.node.attrs["keepdims"]
        place = [ZERO_LANE if a in self.reduced else i for a, i in enumerate(index) if kept or a not in self.reduced]
        store_lane(body, self.target, tuple(place), lane)


@statement_rule(*COMBINERS)
def _(kernel, node):
    reduction = LlvmReductionEmitter(kernel, node)
    long = [a for a, n in enumerate(reduction.shape) if n != 1]
    reduced = [a for a in long if a in reduction.reduced]
    kept = [a for a in long if a not in reduction.reduced]
    lanes = _find_lane_axis(reduction, reduced, kept)
    if not reduced or lanes is not None:
        _reduce_outer_axes(reduction, reduced, kept, lanes)
    else:
        emit_scalar_loops(
            kernel,
            reduction.shape,
            kept,
            [ZERO_LANE] * len(reduction.shape),
            lambda index: _reduce_inner_axis(reduction, reduced, index),
        )
    if reduction.target is not None:
        kernel.buffers[node.out] = reduction.target


def _find_lane_axis(reduction: LlvmReductionEmitter, reduced: list[int], kept: list[int]) -> int | None:
    """The axis whose results the lanes of a register compute; None where lanes share a result.

    It is the innermost axis, or a longer one along which fewer reads are gathers.
    """
    gathers = count_gathers(reduction.kernel, reduction.x)
    inner = max([*kept, *reduced], default=None)
    best = min(kept, key=lambda a: (gathers[a], -a), default=None)
    if best is None or inner is None:
        return None
    if inner in kept:
        return best if gathers[best] < gathers[inner] else inner
    wide = reduction.shape[best] >= reduction.width // 2
    return best if wide and gathers[best] < gathers[inner] else None


def _reduce_outer_axes(reduction: LlvmReductionEmitter, reduced: list[int], kept: list[int], lanes: int | None) -> None:
    """Reduce over outer axes: each lane computes a result of its own, for several registers at once."""
    outer = [a for a in kept if a != lanes]
    index = [ZERO_LANE] * len(reduction.shape)
    emit_scalar_loops(
        reduction.kernel,
        reduction.shape,
        outer,
        index,
        lambda here: _reduce_into_lanes(reduction, reduced, here, lanes),
    )


def _reduce_into_lanes(
    reduction: LlvmReductionEmitter, reduced: list[int], index: list[LaneValue], axis: int | None
) -> None:
    """The results along one axis: groups of registers, then the remainder under a mask."""
    if axis is None:
        _reduce_registers(reduction, reduced, index, None, [None], 1, None)
        return
    count = reduction.shape[axis]
    width = fit_vector_width(reduction.width, count)
    for start, stop, step, mask in _group_registers(count, width):
        with LoopBuilder(reduction.kernel.text, start, stop, step) as loop:
            places = [reduction.kernel.text.add(loop.index, str(n)) for n in range(0, step, width)]
            _reduce_registers(reduction, reduced, index, axis, places, width, mask)


def _group_registers(count: int, width: int) -> list[tuple[str, str, int, str | None]]:
    """The pieces of an axis of results, each of several registers: every piece reads all rows again."""
    whole = count // width
    size = whole if whole <= MAX_LANE_REGISTERS else LANE_REGISTERS
    ends = [0, whole // size * size * width, whole * width] if whole else [0]
    groups = [(a, b, min(size * width, b - a)) for a, b in itertools.pairwise(ends) if a < b]
    rest = _strip_mine_from(whole * width, count, width) if count > whole * width else []
    return [*((str(a), str(b), step, None) for a, b, step in groups), *rest]


def _reduce_registers(
    reduction: LlvmReductionEmitter,
    reduced: list[int],
    index: list[LaneValue],
    axis: int | None,
    places: Sequence[str | None],
    width: int,
    mask: str | None,
) -> None:
    """Reduce into the lanes of some registers, one at each place along an axis."""
    size = len(reduction.combiner.dtypes)

    def inside(here: Sequence[LaneValue], state: ReductionState) -> ReductionState:
        # A body of its own: what is invariant here may differ between iterations of the reduced axis.
        body, names = LoopBody(reduction.kernel, width, mask), list[str]()
        for n, place in enumerate(places):
            at = tuple(here) if axis is None else make_ramp_index(here, axis, str(place), width)
            names += reduction.accumulate(body, at, state[n * size : (n + 1) * size])
        return tuple(names)

    start = reduction.initial_state(width) * len(places)
    state = _emit_carrying_loops(reduction, reduction.shape, reduced, list(index), start, width, inside)
    for n, place in enumerate(places):
        at = tuple(index) if axis is None else make_ramp_index(index, axis, str(place), width)
        body = LoopBody(reduction.kernel, width, mask)
        reduction.store_result(body, at, state[n * size : (n + 1) * size])


def _reduce_inner_axis(reduction: LlvmReductionEmitter, reduced: list[int], index: list[LaneValue]) -> None:
    """Reduce over axes that include the innermost one: lanes are combined at the end."""
    axis, text = reduced[-1], reduction.kernel.text
    width = fit_vector_width(reduction.width, reduction.shape[axis])

    def inside(here: Sequence[LaneValue], state: ReductionState) -> ReductionState:
        return _reduce_row(reduction, list(here), axis, width, state)

    state = _emit_carrying_loops(
        reduction, reduction.shape, reduced[:-1], index, reduction.initial_state(width), width, inside
    )
    reduction.store_result(
        LoopBody(reduction.kernel), tuple(index), combine_across_lanes(text, reduction.combiner, width, state)
    )


def _emit_carrying_loops(
    reduction: LlvmReductionEmitter,
    shape: Sequence[int],
    axes: Sequence[int],
    index: list[LaneValue],
    state: ReductionState,
    width: int,
    inside: Callable[[Sequence[LaneValue], ReductionState], ReductionState],
) -> ReductionState:
    """Loops over some axes that carry a state through `inside(index, state)`."""
    if not axes:
        return inside(index, state)
    first, *rest = axes
    kinds = [str(t) for t in reduction.register_types(width)]
    types = kinds * (len(state) // len(kinds))
    with LoopBuilder(reduction.kernel.text, "0", str(shape[first]), 1, list(zip(types, state, strict=True))) as loop:
        here = [*index]
        here[first] = LaneValue(loop.index)
        loop.values = list(_emit_carrying_loops(reduction, shape, rest, here, tuple(loop.values), width, inside))
    return tuple(loop.values)


def _reduce_row(
    reduction: LlvmReductionEmitter, index: list[LaneValue], axis: int, width: int, state: ReductionState
) -> ReductionState:
    """The innermost axis: unrolled over several accumulators, then the remainder."""
    count, text = reduction.shape[axis], reduction.kernel.text
    before: LineSection = text.new_section()
    outer: dict = {}
    accumulators = ACCUMULATOR_COUNT if count >= 2 * ACCUMULATOR_COUNT * width else 1
    block = count // (accumulators * width) * accumulators * width
    states = [state, *(reduction.initial_state(width) for _ in range(accumulators - 1))]
    if accumulators > 1:
        states = _unroll_accumulators(reduction, index, axis, width, block, states, before, outer)
    for start, stop, step, mask in _strip_mine_from(block if accumulators > 1 else 0, count, width):
        carried = list(zip([str(t) for t in reduction.register_types(width)], states[0], strict=True))
        with LoopBuilder(text, start, stop, step, carried) as loop:
            body = LoopBody(reduction.kernel, width, mask, before, outer)
            loop.values = list(
                reduction.accumulate(body, make_ramp_index(index, axis, loop.index, width), tuple(loop.values))
            )
        states[0] = tuple(loop.values)
    return combine_tree(text, reduction.combiner, width, states)


def _strip_mine_from(first: int, count: int, width: int) -> list[tuple[str, str, int, str | None]]:
    """The pieces of an axis from `first`, a multiple of the width, to its end."""
    parts = strip_mine(count - first, width)
    return [(str(p.start + first), str(p.stop + first), p.width, p.mask) for p in parts]


def _unroll_accumulators(
    reduction: LlvmReductionEmitter,
    index: list[LaneValue],
    axis: int,
    width: int,
    stop: int,
    states: list[ReductionState],
    before: LineSection,
    outer: dict,
) -> list[ReductionState]:
    """A loop over several vectors, each with an accumulator of its own."""
    text, accumulators, size = reduction.kernel.text, len(states), len(states[0])
    kinds = [str(t) for t in reduction.register_types(width)] * accumulators
    with LoopBuilder(
        text, "0", str(stop), accumulators * width, list(zip(kinds, [n for s in states for n in s], strict=True))
    ) as loop:
        names: list[str] = []
        for n in range(accumulators):
            at = make_ramp_index(index, axis, text.add(loop.index, str(n * width)), width)
            body = LoopBody(reduction.kernel, width, None, before, outer)
            names += reduction.accumulate(body, at, tuple(loop.values[n * size : (n + 1) * size]))
        loop.values = names
    return [tuple(loop.values[n * size : (n + 1) * size]) for n in range(accumulators)]
