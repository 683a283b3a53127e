"""How partial results of a reduction combine: a value, or a value and its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tessera.codegen.llvm.emit import Spot, emit
from tessera.codegen.llvm.text import Text
from tessera.codegen.llvm.types import Vec, literal, register
from tessera.op import Op
from tessera.ops import elementwise, reduce
from tessera.types import DType, TensorType, int64

Names = tuple[str, ...]


class Fold(Protocol):
    """A reduction's state: registers, what they begin with, and how two states become one."""

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """The element type of each register."""
        ...

    @property
    def identity(self) -> tuple[str, ...]:
        """What each register begins with."""
        ...

    def combine(self, text: Text, width: int, a: Names, b: Names) -> Names:
        """One state of two."""
        ...


class Simple:
    """A sum, maximum or minimum: one register."""

    def __init__(self, op: Op, dtype: DType, identity: Any) -> None:
        self.op = op
        self.dtypes: tuple[DType, ...] = (dtype,)
        self.identity = (literal(register(dtype).element, identity),)

    def combine(self, text: Text, width: int, a: Names, b: Names) -> Names:
        """One state of two."""
        d = text.name()
        text.lines(emit.of(self.op)(Spot(register(self.dtypes[0], width), self.dtypes[0]), d, a[0], b[0]))
        return (d,)


class Place:
    """The place of an extreme: its value and its index; the first of equals, NaN before all."""

    def __init__(self, larger: bool, dtype: DType) -> None:
        self.larger = larger
        self.dtypes: tuple[DType, ...] = (dtype, int64)
        first = literal(register(dtype).element, lowest(dtype) if larger else highest(dtype))
        self.identity = (first, str(2**63 - 1))

    def combine(self, text: Text, width: int, a: Names, b: Names) -> Names:
        """One state of two."""
        t, i = (register(d, width) for d in self.dtypes)
        take = self._takes(text, t, i, a, b)
        return tuple(
            text.let(f"select {t.truth} {take}, {kind} {y}, {kind} {x}")
            for kind, x, y in zip((t, i), a, b, strict=True)
        )

    def _takes(self, text: Text, t: Vec, i: Vec, a: Names, b: Names) -> str:
        """Whether `b` comes first: more extreme, or as extreme and of lower index."""
        m = t.truth
        better, same = self._float(text, t, a[0], b[0]) if t.is_float else self._integer(text, t, a[0], b[0])
        lower = text.let(f"icmp slt {i} {b[1]}, {a[1]}")
        tie = text.let(f"and {m} {same}, {lower}")
        return text.let(f"or {m} {better}, {tie}")

    def _integer(self, text: Text, t: Vec, x: str, y: str) -> tuple[str, str]:
        sign = "s" if self.dtypes[0].kind == "int" else "u"
        word = f"{sign}gt" if self.larger else f"{sign}lt"
        return text.let(f"icmp {word} {t} {y}, {x}"), text.let(f"icmp eq {t} {y}, {x}")

    def _float(self, text: Text, t: Vec, x: str, y: str) -> tuple[str, str]:
        m = t.truth
        beyond = text.let(f"fcmp {'ogt' if self.larger else 'olt'} {t} {y}, {x}")
        nan_x, nan_y = (text.let(f"fcmp uno {t} {z}, {z}") for z in (x, y))
        only = text.let(f"icmp ugt {m} {nan_y}, {nan_x}")
        equal = text.let(f"fcmp oeq {t} {y}, {x}")
        both = text.let(f"and {m} {nan_x}, {nan_y}")
        return text.let(f"or {m} {beyond}, {only}"), text.let(f"or {m} {equal}, {both}")


def lowest(dtype: DType) -> Any:
    """What no element lies below."""
    return -math.inf if dtype.is_float else -(1 << (dtype.bits - 1)) if dtype.kind == "int" else 0


def highest(dtype: DType) -> Any:
    """What no element lies above."""
    if dtype.is_float:
        return math.inf
    return (1 << (dtype.bits - (dtype.kind == "int"))) - 1


def fold_of(op: Op, type: TensorType) -> Fold:
    """How an op reduces blocks of a type."""
    return FOLDS[op](type)


def _sum(type: TensorType) -> Fold:
    # -0 rather than 0: it leaves every float as it is.
    return Simple(elementwise.add, type.accumulate, -0.0) if type.dtype.is_float else Simple(elementwise.add, int64, 0)


FOLDS: dict[Op, Callable[[TensorType], Fold]] = {
    reduce.sum: _sum,
    reduce.max: lambda type: Simple(elementwise.maximum, type.dtype, lowest(type.dtype)),
    reduce.min: lambda type: Simple(elementwise.minimum, type.dtype, highest(type.dtype)),
    reduce.argmax: lambda type: Place(True, type.dtype),
    reduce.argmin: lambda type: Place(False, type.dtype),
}


def tree(text: Text, fold: Fold, width: int, states: Sequence[Names]) -> Names:
    """Many states as one, neighbours first."""
    while len(states) > 1:
        pairs = zip(states[::2], states[1::2], strict=False)
        odd = [states[-1]] if len(states) % 2 else []
        states = [*(fold.combine(text, width, a, b) for a, b in pairs), *odd]
    return states[0]


def across(text: Text, fold: Fold, width: int, state: Names) -> Names:
    """The elements of a state's registers as one: halves upon each other."""
    while width > 1:
        half = width // 2
        low, high = (
            tuple(_half(text, register(d, width), x, start, half) for d, x in zip(fold.dtypes, state, strict=True))
            for start in (0, half)
        )
        state, width = fold.combine(text, half, low, high), half
    return state


def _half(text: Text, t: Vec, x: str, start: int, count: int) -> str:
    if count == 1:
        return text.let(f"extractelement {t} {x}, i64 {start}")
    picks = ", ".join(f"i32 {start + i}" for i in range(count))
    return text.let(f"shufflevector {t} {x}, {t} poison, <{count} x i32> <{picks}>")
