"""How two elements are combined by each kind of reduction, and what leaves the other as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tessera.codegen.ptx.scalars.emit import Spot, emit
from tessera.codegen.ptx.scalars.words import in_register, select
from tessera.codegen.ptx.text import Text
from tessera.codegen.ptx.types import constant, word
from tessera.op import Op
from tessera.ops import elementwise as e
from tessera.ops import reduce
from tessera.types import DType, bool_, int64

Part = tuple[str, ...]  # an element: its register, and for arg-reductions that of its place
LAST = (1 << 62) - 1


@dataclass(frozen=True)
class Combine:
    """A reduction: the types of an element's parts, what joins two, and the part that changes nothing."""

    dtypes: tuple[DType, ...]
    join: Callable[[Text, Part, Part], Part]
    neutral: tuple[float | bool, ...]

    def constants(self) -> tuple[float | bool | str, ...]:
        """The neutral part as immediates; a bool as it is."""
        return tuple(n if d == bool_ else constant(n, d) for n, d in zip(self.neutral, self.dtypes, strict=True))


def combiner(op: Op, dtype: DType) -> Combine:
    """The way of combining of a reduction of elements of a type."""
    if op in PLACES:
        return Combine((dtype, int64), _placed(PLACES[op], dtype), (LIMIT[op](dtype), LAST))
    row = emit.of(PLAIN[op])

    def join(text: Text, a: Part, b: Part) -> Part:
        return (row(Spot(text, dtype, dtype), a[0], b[0]),)

    return Combine((dtype,), join, (LIMIT[op](dtype),))


def _zero(dtype: DType) -> float | bool:
    return 0


def _least(dtype: DType) -> float | bool:
    if dtype.is_float:
        return -math.inf
    return False if dtype == bool_ else 0 if dtype.kind == "uint" else -(1 << (dtype.bits - 1))


def _greatest(dtype: DType) -> float | bool:
    if dtype.is_float:
        return math.inf
    return True if dtype == bool_ else (1 << dtype.bits) - 1 if dtype.kind == "uint" else (1 << (dtype.bits - 1)) - 1


PLAIN: dict[Op, Op] = {reduce.sum: e.add, reduce.max: e.maximum, reduce.min: e.minimum}
PLACES: dict[Op, Op] = {reduce.argmax: e.greater, reduce.argmin: e.less}
LIMIT: dict[Op, Callable[[DType], float | bool]] = {
    reduce.sum: _zero, reduce.max: _least, reduce.argmax: _least, reduce.min: _greatest, reduce.argmin: _greatest,
}  # fmt: skip


def _placed(better: Op, dtype: DType) -> Callable[[Text, Part, Part], Part]:
    """The better element with its place; of equal ones the first, and a NaN before any number."""
    row, same = emit.of(better), emit.of(e.equal)

    def join(text: Text, a: Part, b: Part) -> Part:
        x, y, spot = a[0], b[0], Spot(text, dtype, bool_)
        take, tied = row(spot, y, x), same(spot, y, x)
        if dtype.is_float:
            take, tied = _before_numbers(text, word(dtype), x, y, take, tied)
        earlier = text.let("setp.lt.s64", "pred", in_register(text, "b64", b[1]), a[1])
        chosen = text.let("or.pred", "pred", take, text.let("and.pred", "pred", tied, earlier))
        return select(text, dtype, chosen, y, x), text.let("selp.b64", "b64", b[1], a[1], chosen)

    return join


def _before_numbers(text: Text, form: str, x: str, y: str, take: str, tied: str) -> tuple[str, str]:
    """Taken also if `y` is NaN and `x` is not; tied also if both are."""
    kind = form
    first, second = (in_register(text, kind, each) for each in (x, y))
    strange, other = (text.let(f"setp.nan.{form}", "pred", each, each) for each in (second, first))
    fresh = text.let("and.pred", "pred", strange, text.let("not.pred", "pred", other))
    both = text.let("and.pred", "pred", strange, other)
    return text.let("or.pred", "pred", take, fresh), text.let("or.pred", "pred", tied, both)
