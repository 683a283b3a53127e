"""The emission rows of the scalar functions: formulas translated, and the division of floats that rounds down."""

from __future__ import annotations

from tessera.codegen.ptx.scalars.emit import Spot, emit, floored
from tessera.codegen.ptx.scalars.formula import apply
from tessera.ops import elementwise as e
from tessera.ops import functions as f


def _function(name: str):  # type: ignore[no-untyped-def]
    return lambda s, *xs: apply(s.text, name, s.word, *xs)


for _op in (e.exp, e.exp2, e.log, e.log2, e.tanh, e.erf, e.sin, e.cos, e.pow, f.expm1, f.log1p, f.atan):
    emit(_op)(_function(_op.__name__))


@emit(e.floor_divide)
def _(s: Spot, x: str, y: str) -> str:
    return apply(s.text, "floor_divide", s.word, x, y) if s.kind == "f" else s.wrap(floored(s, x, y)[0])


@emit(e.remainder)
def _(s: Spot, x: str, y: str) -> str:
    return apply(s.text, "remainder", s.word, x, y) if s.kind == "f" else s.wrap(floored(s, x, y)[1])
