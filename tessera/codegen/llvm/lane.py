"""One register's worth of a block's elements, and the straight-line code in which they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from tessera.codegen.llvm.text import Lines, Text, is_number
from tessera.codegen.llvm.types import Vec, register
from tessera.types import DType

if TYPE_CHECKING:
    from tessera.codegen.llvm.kernel import Kernel


class Kind(Enum):
    """How a value varies over the elements of a register."""

    FIXED = "the same scalar in each, and in every round of the innermost loop"
    EVEN = "the same scalar in each"
    RAMP = "an i64 scalar, plus the number of the element"
    VARYING = "a vector"


@dataclass(frozen=True)
class Lane:
    """The name of a value at a point, and what the name holds; for an index, a number that divides the scalar."""

    name: str
    kind: Kind = Kind.FIXED
    multiple: int = 1

    @property
    def uniform(self) -> bool:
        """Whether all elements are the same."""
        return self.kind in (Kind.FIXED, Kind.EVEN)

    @property
    def divisor(self) -> int:
        """The largest known number that divides the scalar (0 for the scalar 0, which all numbers divide)."""
        return abs(int(self.name)) if is_number(self.name) else self.multiple


ZERO = Lane("0")
Index = tuple[Lane, ...]
Memo = dict[Any, Lane]


class Body:
    """A stretch of straight-line code in which block values are computed, `width` elements at a time.

    `mask` is a constant that leaves out the elements past the end of an axis. What does not vary
    over the elements is computed once, in `before`, the lines ahead of the innermost loop.
    """

    def __init__(
        self,
        kernel: Kernel,
        width: int = 1,
        mask: str | None = None,
        before: Lines | None = None,
        outer: Memo | None = None,
    ) -> None:
        self.kernel, self.width, self.mask = kernel, width, mask
        self.text: Text = kernel.text
        self._before = before
        self._inner: Memo = {}
        self._outer = self._inner if before is None or outer is None else outer

    def memo(self, *lanes: Lane) -> Memo:
        """What is known here already of values that depend on these."""
        return self._outer if self.kind_of(*lanes) is Kind.FIXED else self._inner

    def kind_of(self, *lanes: Lane) -> Kind:
        """How a result of these varies."""
        if self.width_of(*lanes) > 1:
            return Kind.VARYING
        return Kind.EVEN if any(x.kind is not Kind.FIXED for x in lanes) else Kind.FIXED

    @contextmanager
    def hoisted(self, *lanes: Lane) -> Iterator[None]:
        """Put what depends on these ahead of the innermost loop, where none of them varies in it."""
        if self._before is None or self.kind_of(*lanes) is not Kind.FIXED:
            yield
            return
        with self.text.into(self._before):
            yield

    def type(self, dtype: DType, *lanes: Lane) -> Vec:
        """The register type of elements, one for lanes that are all uniform."""
        return register(dtype, self.width_of(*lanes))

    def width_of(self, *lanes: Lane) -> int:
        """How many elements a result of these has."""
        return 1 if all(x.uniform for x in lanes) else self.width

    def spread(self, lane: Lane, t: Vec) -> str:
        """A lane as a value of this type: uniform ones repeated, ramps counted out."""
        if t.width == 1 or lane.kind is Kind.VARYING:
            return lane.name
        with self.hoisted(lane):
            whole = splat(self.text, t, lane.name)
        if lane.uniform:
            return whole
        return self.text.let(f"add {t} {whole}, {steps(t)}", "r")


def splat(text: Text, t: Vec, name: str) -> str:
    """A scalar repeated in each element."""
    if not name.startswith("%"):
        return f"splat ({t.element} {name})"
    one = text.let(f"insertelement {t} poison, {t.element} {name}, i64 0", "s")
    return text.let(f"shufflevector {t} {one}, {t} poison, <{t.width} x i32> zeroinitializer", "s")


def steps(t: Vec, by: int = 1) -> str:
    """The constant 0, by, 2 by, …"""
    return "<" + ", ".join(f"{t.element} {i * by}" for i in range(t.width)) + ">"


def ones(width: int, count: int) -> str:
    """The mask that holds for the first `count` elements."""
    return "<" + ", ".join(f"i1 {'true' if i < count else 'false'}" for i in range(width)) + ">"
