"""Combiners of reductions: the state of a reduction, and how two partial results become one.

An argmax or argmin carries a value and its index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tessera.codegen.llvm.table.emission import RowTypes, pointwise_row
from tessera.codegen.llvm.text.builder import LlvmBuilder, RegisterType, format_literal, get_register_type
from tessera.core.types import DType, TensorType, int32, int64
from tessera.ir.rules import Op
from tessera.ops.tensor import elementwise, reduce

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
        d, types = text.new_name(), RowTypes(get_register_type(self.dtypes[0], width), self.dtypes[0])
        text.lines(pointwise_row.of(self.op)(types, d, a[0], b[0]))
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


def combine_rows(
    text: LlvmBuilder, combiner: ReductionCombiner, width: int, rows: Sequence[ReductionState]
) -> ReductionState:
    """The lanes of several states combined, each as by `combine_across_lanes`: the result has a lane for each state.

    Two registers are halved into one by two shuffles, until each state has one lane. The number of states is a power of
    two up to the width.
    """
    states, lanes = list(rows), width  # of a state in a register, which holds width // lanes of them
    while lanes > 1:
        count, half = min(len(states), 2), lanes // 2
        starts = range(0, count * width, lanes)
        states = [
            combiner.combine(
                text, count * width // 2,
                *(_pick_lanes(text, combiner, width, states[n : n + count], starts, at, half) for at in (0, half)),
            )
            for n in range(0, len(states), count)
        ]  # fmt: skip
        width, lanes = count * width // 2, half
    return states[0]


def _pick_lanes(
    text: LlvmBuilder, combiner: ReductionCombiner, width: int, states: Sequence[ReductionState], starts: range,
    offset: int, count: int,
) -> ReductionState:  # fmt: skip
    """So many lanes from an offset behind each start, of one state or of two joined."""
    picks = ", ".join(f"i32 {start + offset + i}" for start in starts for i in range(count))
    size, picked = len(starts) * count, []
    for d, first, last in zip(combiner.dtypes, states[0], states[-1], strict=True):
        t, second = get_register_type(d, width), last if len(states) > 1 else "poison"
        if size == 1:
            picked.append(text.let(f"extractelement {t} {first}, i64 {starts[0] + offset}"))
        else:
            picked.append(text.let(f"shufflevector {t} {first}, {t} {second}, <{size} x i32> <{picks}>"))
    return tuple(picked)
