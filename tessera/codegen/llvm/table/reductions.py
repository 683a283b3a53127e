"""Reductions: loops over the reduced axes that carry vector accumulators, combined in a fixed order.

An argmax or argmin carries a value and its index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tessera.codegen.block_types import get_tensor_type, static_shape
from tessera.codegen.llvm.passes.bufferisation import is_block
from tessera.codegen.llvm.table.emission import RowTypes, pointwise_row, statement_rule
from tessera.codegen.llvm.table.loop_fusion import (
    choose_vector_width,
    emit_element,
    emit_loop_nest,
    emit_scalar_loops,
    make_ramp_index,
    round_to_storage,
    strip_mine,
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
)
from tessera.codegen.llvm.text.memory import StridedMemRef, fit_vector_width, store_lane
from tessera.codegen.llvm.text.types import RegisterType, format_literal, get_register_type
from tessera.core.types import DType, TensorType, int64
from tessera.ir.core import Node
from tessera.ir.rules import Op
from tessera.ops.tensor import elementwise, reduce

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_emitter import LlvmKernelEmitter


# How partial results of a reduction combine: a value, or a value and its place.


ReductionState = tuple[str, ...]


class ReductionCombiner(Protocol):
    """A reduction's state: registers, what they begin with, and how two states become one."""

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element type of each register."""
        ...

    @property
    def identity(self) -> tuple[str, ...]:
        """What each register begins with."""
        ...

    def combine(self, text: LlvmBuilder, width: int, a: ReductionState, b: ReductionState) -> ReductionState:
        """One state of two."""
        ...


class ScalarCombiner:
    """A sum, maximum or minimum: one register."""

    def __init__(self, op: Op, dtype: DType, identity: Any) -> None:
        self.op = op
        self.dtypes: tuple[DType, ...] = (dtype,)
        self.identity = (format_literal(get_register_type(dtype).element, identity),)

    def combine(self, text: LlvmBuilder, width: int, a: ReductionState, b: ReductionState) -> ReductionState:
        """One state of two."""
        d = text.name()
        text.lines(
            pointwise_row.of(self.op)(RowTypes(get_register_type(self.dtypes[0], width), self.dtypes[0]), d, a[0], b[0])
        )
        return (d,)


class ArgReduceCombiner:
    """The place of an extreme: its value and its index; the first of equals, NaN before all."""

    def __init__(self, larger: bool, dtype: DType) -> None:
        self.larger = larger
        self.dtypes: tuple[DType, ...] = (dtype, int64)
        first = format_literal(get_register_type(dtype).element, get_lowest(dtype) if larger else get_highest(dtype))
        self.identity = (first, str(2**63 - 1))

    def combine(self, text: LlvmBuilder, width: int, a: ReductionState, b: ReductionState) -> ReductionState:
        """One state of two."""
        t, i = (get_register_type(d, width) for d in self.dtypes)
        take = self._takes(text, t, i, a, b)
        return tuple(
            text.let(f"select {t.truth} {take}, {kind} {y}, {kind} {x}")
            for kind, x, y in zip((t, i), a, b, strict=True)
        )

    def _takes(self, text: LlvmBuilder, t: RegisterType, i: RegisterType, a: ReductionState, b: ReductionState) -> str:
        """Whether `b` comes first: more extreme, or as extreme and of lower index."""
        m = t.truth
        better, same = self._float(text, t, a[0], b[0]) if t.is_float else self._integer(text, t, a[0], b[0])
        lower = text.let(f"icmp slt {i} {b[1]}, {a[1]}")
        tie = text.let(f"and {m} {same}, {lower}")
        return text.let(f"or {m} {better}, {tie}")

    def _integer(self, text: LlvmBuilder, t: RegisterType, x: str, y: str) -> tuple[str, str]:
        sign = "s" if self.dtypes[0].kind == "int" else "u"
        word = f"{sign}gt" if self.larger else f"{sign}lt"
        return text.let(f"icmp {word} {t} {y}, {x}"), text.let(f"icmp eq {t} {y}, {x}")

    def _float(self, text: LlvmBuilder, t: RegisterType, x: str, y: str) -> tuple[str, str]:
        m = t.truth
        beyond = text.let(f"fcmp {'ogt' if self.larger else 'olt'} {t} {y}, {x}")
        nan_x, nan_y = (text.let(f"fcmp uno {t} {z}, {z}") for z in (x, y))
        only = text.let(f"icmp ugt {m} {nan_y}, {nan_x}")
        equal = text.let(f"fcmp oeq {t} {y}, {x}")
        both = text.let(f"and {m} {nan_x}, {nan_y}")
        return text.let(f"or {m} {beyond}, {only}"), text.let(f"or {m} {equal}, {both}")


def get_lowest(dtype: DType) -> Any:
    """What no element lies below."""
    return -math.inf if dtype.is_float else -(1 << (dtype.bits - 1)) if dtype.kind == "int" else 0


def get_highest(dtype: DType) -> Any:
    """What no element lies above."""
    if dtype.is_float:
        return math.inf
    return (1 << (dtype.bits - (dtype.kind == "int"))) - 1


def find_combiner(op: Op, type: TensorType) -> ReductionCombiner:
    """How an op reduces blocks of a type."""
    return COMBINERS[op](type)


def _make_sum_combiner(type: TensorType) -> ReductionCombiner:
    # -0 rather than 0: it leaves every float as it is.
    return (
        ScalarCombiner(elementwise.add, type.accumulate, -0.0)
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
    text: LlvmBuilder, fold: ReductionCombiner, width: int, states: Sequence[ReductionState]
) -> ReductionState:
    """Many states as one, neighbours first."""
    while len(states) > 1:
        pairs = zip(states[::2], states[1::2], strict=False)
        odd = [states[-1]] if len(states) % 2 else []
        states = [*(fold.combine(text, width, a, b) for a, b in pairs), *odd]
    return states[0]


def combine_across_lanes(
    text: LlvmBuilder, fold: ReductionCombiner, width: int, state: ReductionState
) -> ReductionState:
    """The elements of a state's registers as one: halves upon each other."""
    while width > 1:
        half = width // 2
        low, high = (
            tuple(
                _extract_half(text, get_register_type(d, width), x, start, half)
                for d, x in zip(fold.dtypes, state, strict=True)
            )
            for start in (0, half)
        )
        state, width = fold.combine(text, half, low, high), half
    return state


def _extract_half(text: LlvmBuilder, t: RegisterType, x: str, start: int, count: int) -> str:
    if count == 1:
        return text.let(f"extractelement {t} {x}, i64 {start}")
    picks = ", ".join(f"i32 {start + i}" for i in range(count))
    return text.let(f"shufflevector {t} {x}, {t} poison, <{count} x i32> <{picks}>")


# Reductions: loops over the reduced axes that carry vector accumulators, combined in a fixed order.


ACCUMULATOR_COUNT = 4  # independent ones, so that an addition need not wait for the one before


class LlvmReductionEmitter:
    """One reduction being emitted: which axes go, how states combine, where results are put."""

    def __init__(self, kernel: LlvmKernelEmitter, node: Node) -> None:
        self.kernel, self.node, self.x = kernel, node, node.args[0]
        self.shape = static_shape(self.x.type)
        axis = node.attrs["axis"]
        listed = axis if isinstance(axis, tuple) else (axis,)
        self.gone = sorted(a % self.x.type.rank for a in listed) if self.shape else []
        self.fold: ReductionCombiner = find_combiner(node.op, get_tensor_type(self.x))
        self.target: StridedMemRef | None = kernel.room(node.out) if is_block(node.out) else None
        self.width = choose_vector_width(kernel, *self.fold.dtypes[:1])

    def types(self, width: int) -> list[RegisterType]:
        """The registers of a state."""
        return [get_register_type(d, width) for d in self.fold.dtypes]

    def start(self, width: int) -> ReductionState:
        """The state before any element."""
        return tuple(
            name if width == 1 else f"splat ({t.element} {name})"
            for t, name in zip(self.types(width), self.fold.identity, strict=True)
        )

    def elements(self, body: LoopBody, index: LaneIndex) -> ReductionState:
        """The state of the elements at an index alone."""
        t = self.types(body.width)
        value = widen_lane(body, self.x.type.dtype, self.fold.dtypes[0], emit_element(body, self.x, index))
        lanes = [value, *(index[a] for a in self.gone if len(t) > 1)]
        names = tuple(body.broadcast_lane(lane, kind) for lane, kind in zip(lanes, t, strict=True))
        if body.mask is None:
            return names
        return tuple(
            body.text.let(f"select {kind.truth} {body.mask}, {kind} {x}, {kind} {none}")
            for kind, x, none in zip(t, names, self.start(body.width), strict=True)
        )

    def add(self, body: LoopBody, index: LaneIndex, state: ReductionState) -> ReductionState:
        """A state with the elements at an index."""
        return self.fold.combine(self.kernel.text, body.width, state, self.elements(body, index))

    def finish(self, body: LoopBody, index: LaneIndex, state: ReductionState) -> None:
        """Put a result where it belongs."""
        wide = self.fold.dtypes[-1]
        lane = LaneValue(state[-1], LaneKind.INVARIANT if body.width == 1 else LaneKind.VARYING)
        lane = round_to_storage(body, get_tensor_type(self.node.out), wide, lane)
        if self.target is None:
            self.kernel.scalars[self.node.out] = lane.name
            return
        kept = self.node.attrs["keepdims"]
        place = [ZERO_LANE if a in self.gone else i for a, i in enumerate(index) if kept or a not in self.gone]
        store_lane(body, self.target, tuple(place), lane)


@statement_rule(*COMBINERS)
def _(kernel, node):
    r = LlvmReductionEmitter(kernel, node)
    long = [a for a, n in enumerate(r.shape) if n != 1]
    gone = [a for a in long if a in r.gone]
    kept = [a for a in long if a not in r.gone]
    if not gone or gone[-1] != long[-1]:
        _reduce_outer_axes(r, gone)
    else:
        emit_scalar_loops(
            kernel, r.shape, kept, [ZERO_LANE] * len(r.shape), lambda index: _reduce_inner_axis(r, gone, index)
        )
    if r.target is not None:
        kernel.buffers[node.out] = r.target


def _reduce_outer_axes(r: LlvmReductionEmitter, gone: list[int]) -> None:
    """Reduce over outer axes: each element of a register is a result of its own."""

    def visit_kept(body: LoopBody, index: LaneIndex) -> None:
        def inside(here: Sequence[LaneValue], state: ReductionState) -> ReductionState:
            # A body of its own: what is uniform here may differ from one round to the next.
            return r.add(LoopBody(r.kernel, body.width, body.mask), tuple(here), state)

        state = _emit_carrying_loops(r, r.shape, gone, list(index), r.start(body.width), body.width, inside)
        r.finish(LoopBody(r.kernel, body.width, body.mask), index, state)

    emit_loop_nest(r.kernel, [1 if a in r.gone else n for a, n in enumerate(r.shape)], r.width, visit_kept)


def _reduce_inner_axis(r: LlvmReductionEmitter, gone: list[int], index: list[LaneValue]) -> None:
    """Reduce over axes of which the last is the innermost: a register holds neighbours."""
    axis, text = gone[-1], r.kernel.text
    width = fit_vector_width(r.width, r.shape[axis])

    def inside(here: Sequence[LaneValue], state: ReductionState) -> ReductionState:
        return _reduce_row(r, list(here), axis, width, state)

    state = _emit_carrying_loops(r, r.shape, gone[:-1], index, r.start(width), width, inside)
    r.finish(LoopBody(r.kernel), tuple(index), combine_across_lanes(text, r.fold, width, state))


def _emit_carrying_loops(
    r: LlvmReductionEmitter,
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
    types = [str(t) for t in r.types(width)]
    with LoopBuilder(r.kernel.text, "0", str(shape[first]), 1, list(zip(types, state, strict=True))) as loop:
        here = [*index]
        here[first] = LaneValue(loop.index)
        loop.values = list(_emit_carrying_loops(r, shape, rest, here, tuple(loop.values), width, inside))
    return tuple(loop.values)


def _reduce_row(
    r: LlvmReductionEmitter, index: list[LaneValue], axis: int, width: int, state: ReductionState
) -> ReductionState:
    """The innermost axis: several accumulators over whole vectors, then what is left."""
    count, text = r.shape[axis], r.kernel.text
    before: LineSection = text.section()
    outer: dict = {}
    many = ACCUMULATOR_COUNT if count >= 2 * ACCUMULATOR_COUNT * width else 1
    block = count // (many * width) * many * width
    states = [state, *(r.start(width) for _ in range(many - 1))]
    if many > 1:
        states = _unroll_accumulators(r, index, axis, width, block, states, before, outer)
    for start, stop, step, mask in _strip_mine_from(block if many > 1 else 0, count, width):
        carried = list(zip([str(t) for t in r.types(width)], states[0], strict=True))
        with LoopBuilder(text, start, stop, step, carried) as loop:
            body = LoopBody(r.kernel, width, mask, before, outer)
            loop.values = list(r.add(body, make_ramp_index(index, axis, loop.index, width), tuple(loop.values)))
        states[0] = tuple(loop.values)
    return combine_tree(text, r.fold, width, states)


def _strip_mine_from(first: int, count: int, width: int) -> list[tuple[str, str, int, str | None]]:
    """The stretches of an axis from `first`, a multiple of the width, on."""
    parts = strip_mine(count - first, width)
    return [(str(int(a) + first), str(int(b) + first), step, mask) for a, b, step, mask in parts]


def _unroll_accumulators(
    r: LlvmReductionEmitter,
    index: list[LaneValue],
    axis: int,
    width: int,
    stop: int,
    states: list[ReductionState],
    before: LineSection,
    outer: dict,
) -> list[ReductionState]:
    """Whole rounds of several vectors, each into an accumulator of its own."""
    text, many, size = r.kernel.text, len(states), len(states[0])
    kinds = [str(t) for t in r.types(width)] * many
    with LoopBuilder(
        text, "0", str(stop), many * width, list(zip(kinds, [n for s in states for n in s], strict=True))
    ) as loop:
        names: list[str] = []
        for n in range(many):
            at = make_ramp_index(index, axis, text.add(loop.index, str(n * width)), width)
            body = LoopBody(r.kernel, width, None, before, outer)
            names += r.add(body, at, tuple(loop.values[n * size : (n + 1) * size]))
        loop.values = names
    return [tuple(loop.values[n * size : (n + 1) * size]) for n in range(many)]
