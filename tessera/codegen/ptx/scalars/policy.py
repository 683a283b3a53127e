"""Storing under a policy: toward zero, saturating, subnormals flushed, each from what was computed and rounded once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tessera.codegen.policies import refuse, special
from tessera.codegen.ptx.scalars.convert import convert
from tessera.codegen.ptx.text import Text
from tessera.codegen.ptx.types import literal, word
from tessera.numerics.rounding import FINITE_ONLY, Grid, grid_of
from tessera.types import DType, Policy, TensorType, f32, f64

if TYPE_CHECKING:
    from tessera.ir.core import Function, Node

DIGITS, LEAST = 23, -126  # of an f32: the digits after its leading one, and its least exponent
TOP, TINY = 2.0**1023 * (2.0 - 2.0**-52), 2.0**-1022  # of an f64: its largest and its least normal number


def check_policy(node: Node) -> None:
    """Refuse results rounded by chance, which kernels have as an op of its own.

    Raises:
        UnsupportedOpError: it names the policy.
    """
    for v in node.results:
        if v.type.policy is not None and v.type.policy.rounding == "stochastic":
            raise refuse("ptx", "rounding=stochastic", node.loc)


def has_policies(function: Function) -> bool:
    """Whether some result is stored otherwise than to nearest even: each op then stands for itself."""
    return any(special(v.type.policy) for node in function.body.walk() for v in node.results)


def stored(text: Text, wide: DType, type: TensorType, x: str) -> str:
    """What was computed in a wide type as its storage and policy have it."""
    policy, to = type.policy, type.dtype
    if policy is None or not special(policy) or not to.is_float:
        return convert(text, wide, to, x)
    if not wide.is_float:
        wide, x = f64, convert(text, wide, f64, x)
    if to is f64:
        return _finished(text, f64, policy, TOP, TINY, convert(text, wide, f64, x))
    grid = grid_of(to)
    if policy.saturate or to in FINITE_ONLY:
        x = _limited(text, wide, x, grid.top, infinite=True)
    if policy.rounding == "toward_zero":
        wide, x = f32, _toward_zero(text, wide, to, grid, x)
    found = convert(text, wide, to, x)
    return flushed(text, f32, 2.0**grid.least, found) if policy.denormals == "flush" else found


def _finished(text: Text, dtype: DType, policy: Policy, top: float, tiny: float, x: str) -> str:
    """A number that needs no rounding."""
    x = _limited(text, dtype, x, top, infinite=True) if policy.saturate else x
    return flushed(text, dtype, tiny, x) if policy.denormals == "flush" else x


def outside(policy: Policy | None, to: DType, grid: Grid) -> float:
    """What stands for numbers beyond the largest."""
    if to in FINITE_ONLY or (policy is not None and policy.saturate):
        return grid.top
    return math.inf if grid.infinite else math.nan


def _limited(text: Text, dtype: DType, x: str, top: float, infinite: bool) -> str:
    """What lies beyond the largest number becomes that, infinities if they are to; NaN stays."""
    form = word(dtype)
    size = text.let(f"abs.{form}", form, x)
    beyond = text.let(f"setp.gt.{form}", "pred", size, literal(form, top))
    if not infinite:
        finite = text.let(f"setp.lt.{form}", "pred", size, literal(form, math.inf))
        beyond = text.let("and.pred", "pred", beyond, finite)
    kept = text.let(f"selp.{form}", form, literal(form, top), size, beyond)
    return text.let(f"copysign.{form}", form, x, kept)


def flushed(text: Text, dtype: DType, tiny: float, x: str) -> str:
    """What lies below the least normal number becomes 0, with its sign."""
    form = word(dtype)
    size = text.let(f"abs.{form}", form, x)
    low = text.let(f"setp.lt.{form}", "pred", size, literal(form, tiny))
    kept = text.let(f"selp.{form}", form, literal(form, 0.0), size, low)
    return text.let(f"copysign.{form}", form, x, kept)


def _toward_zero(text: Text, wide: DType, to: DType, grid: Grid, x: str) -> str:
    """An f32 on the grid of a type, no larger than the number; what is finite stays so."""
    if wide is f64:  # the grid of f32 holds that of every narrower type: cutting twice is cutting once
        x = text.let("cvt.rz.f32.f64", "f32", x)
    return x if to is f32 else _limited(text, f32, _cut(text, grid, x), grid.top, infinite=False)


def _cut(text: Text, grid: Grid, x: str) -> str:
    """Fewer digits; below the least normal number the steps are equal. NaN and infinity stay as they are."""
    bits = text.let("mov.b32", "b32", x)
    kept = text.let("mov.b32", "f32", text.let("and.b32", "b32", bits, -(1 << (DIGITS - grid.digits))))
    size = text.let("abs.f32", "f32", x)
    if grid.least > LEAST:
        step = 2.0 ** (grid.least - grid.digits)
        whole = text.let("cvt.rzi.f32.f32", "f32", text.let("mul.rn.f32", "f32", x, literal("f32", 1 / step)))
        small = text.let("mul.rn.f32", "f32", whole, literal("f32", step))
        low = text.let("setp.lt.f32", "pred", size, literal("f32", 2.0**grid.least))
        kept = text.let("selp.f32", "f32", small, kept, low)
    finite = text.let("setp.lt.f32", "pred", size, literal("f32", math.inf))
    return text.let("selp.f32", "f32", kept, x, finite)
