"""Stochastic rounding of a double: of its two neighbours on a format's grid, the one that a draw chooses."""

from __future__ import annotations

from tessera.codegen.ptx.scalars.emit import Spot, emit
from tessera.codegen.ptx.scalars.policy import flushed, outside
from tessera.codegen.ptx.types import literal
from tessera.numerics.rounding import Grid, grid_of
from tessera.ops.chance import round_by_chance
from tessera.types import f64

BIAS, DIGITS = 1023, 52


@emit(round_by_chance)
def _(s, x, draw):
    s = Spot(s.text, f64, s.out, s.policy)
    grid = grid_of(s.out)
    near = _neighbour(s, grid, s.do("abs.f64", x), draw)
    beyond = s.text.let("setp.gt.f64", "pred", near, literal("f64", grid.top))
    kept = s.do("selp.f64", literal("f64", outside(s.policy, s.out, grid)), near, beyond)
    if s.policy is not None and s.policy.denormals == "flush":
        kept = flushed(s.text, f64, 2.0**grid.least, kept)
    return s.text.let("cvt.rn.f32.f64", "f32", s.do("copysign.f64", x, kept))


def _neighbour(s: Spot, grid: Grid, size: str, draw: str) -> str:
    """On the grid, by exact steps; infinity and NaN stay."""
    bits = s.text.let("shr.u64", "b64", s.text.let("mov.b64", "b64", size), DIGITS)
    exponent = s.text.let("max.s64", "b64", bits, grid.least + BIAS)
    steps = s.do("mul.rn.f64", size, _power(s, s.text.let("sub.s64", "b64", grid.digits + 2 * BIAS, exponent)))
    low = s.do("cvt.rmi.f64.f64", steps)
    distance = s.do("mul.rn.f64", s.do("sub.rn.f64", steps, low), literal("f64", 2.0**53))
    up = s.text.let("setp.lt.f64", "pred", s.do("cvt.rn.f64.s64", draw), distance)
    chosen = s.do("selp.f64", s.do("add.rn.f64", low, literal("f64", 1.0)), low, up)
    near = s.do("mul.rn.f64", chosen, _power(s, s.text.let("sub.s64", "b64", exponent, grid.digits)))
    finite = s.text.let("setp.lt.f64", "pred", size, literal("f64", float("inf")))
    return s.do("selp.f64", near, size, finite)


def _power(s: Spot, exponent: str) -> str:
    """Two to a power, whose exponent has the bias of a double."""
    return s.do("mov.b64", s.text.let("shl.b64", "b64", exponent, DIGITS))
