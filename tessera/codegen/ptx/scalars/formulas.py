"""The scalar functions that the hardware has not: the table of formulas, and those of f32.

Polynomials are Chebyshev fits on the reduced range, of relative error below 2^-27 (f32) or 2^-58 (f64). Each result
lies within the bounds of the OpenCL full profile; `tests/codegen/ptx/test_functions.py` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tessera.codegen.formulas import FLOOR_DIVIDE, LOG, LOG2, POWER, REMAINDER
from tessera.codegen.ptx.scalars.formula import TABLE
from tessera.codegen.ptx.scalars.formula import apply as apply_formula
from tessera.codegen.ptx.scalars.formulas_power import POWER_WIDE
from tessera.codegen.ptx.scalars.formulas_wide import (
    ATAN_WIDE,
    ERF_WIDE,
    EXP2_WIDE,
    EXP_WIDE,
    EXPM1_WIDE,
    LOG1P_WIDE,
    LOG2_WIDE,
    LOG_WIDE,
    TANH_WIDE,
)
from tessera.codegen.ptx.scalars.trigonometry import cosine, cosine_wide, sine, sine_wide
from tessera.codegen.ptx.text import Text
from tessera.codegen.ptx.types import literal

# e^x = 2^y * (1 + c): y is x log2 e rounded, and c what that left out. The hardware's 2^y is as good for large y.
EXP = """
x1 = least x 89.0
x2 = most x1 -110.0
y = fmul x2 1.44269504
g = fneg y
l0 = fma x2 1.44269504 g
l = fma x2 1.92596303e-8 l0
c = fma l 0.693147181 1.0
e = ex2 y
r = fmul e c
"""
EXP2 = "r = ex2 x"
# 1 - 2 / (e^2|x| + 1) from 0.625 on, where what the hardware's approximations are off counts for little.
TANH = """
a = fabs x
y = fmul a 2.88539008
e = ex2z y
e1 = fadd e 1.0
h = rcpz e1
o = fma h -2.0 1.0
far = copysign o x
z = fmul x x
q = poly z -0.00569351809 0.0206304099 -0.0537376143 0.133314252 -0.333332807
zx = fmul z x
near = fma q zx x
c = lt a 0.625
r = select c near far
"""
# The fit of codegen/formulas.py, its exponent in powers of two.
ERF = """
a = fabs x
t = least a 4.0
s = fmul t t
u0 = fma -2.49374844e-05 t 0.000552836593
u1 = fma -0.00560337615 t 0.0349920227
p0 = fma u0 s u1
p1 = poly t p0 -0.154047914 -0.915890167 -1.62839516
p2 = fmul p1 t
ex = ex2z p2
o = fsub 1.0 ex
far = copysign o x
q = poly s -5.96761703e-4 4.99119423e-3 -2.67681349e-2 1.12819925e-1 -3.76125336e-1 1.28379166e-1
near = fma q x x
d = gt a 0.927734375
r = select d far near
"""

DOUBLE_ZERO, DOUBLE_INFINITY, DOUBLE_NAN = (literal("f64", n) for n in (0.0, math.inf, math.nan))


def _by_wide(name: str) -> Callable[..., str]:
    """A function of f32 by way of the one of f64: rounded once, and so within an ulp."""

    def define(text: Text, *operands: str) -> str:
        wide = [text.let("cvt.f64.f32", "f64", x) for x in operands]
        return text.let("cvt.rn.f32.f64", "f32", apply_formula(text, name, "f64", *wide))

    return define


def fmod(text: Text, x: str, y: str) -> str:
    """What is left of f64 `x` when whole multiples of `y` are taken away, as C's fmod: exact.

    Each round takes away a multiple of 26 bits, rounded down, so that the rest is exact as well.
    """
    large, size = text.let("abs.f64", "f64", x), text.let("abs.f64", "f64", y)
    usable = text.let("setp.gt.f64", "pred", size, DOUBLE_ZERO)
    finite = text.let("setp.lt.f64", "pred", large, DOUBLE_INFINITY)
    fine = text.let("and.pred", "pred", usable, finite)
    rest = text.let("selp.f64", "f64", large, DOUBLE_NAN, fine)
    again, done = text.new_label("again"), text.new_label("done")
    text.label(again)
    text.do(f"bra {done}", guard=text.let("setp.ltu.f64", "pred", rest, size))
    quotient = text.let("cvt.rzi.f64.f64", "f64", text.let("div.rz.f64", "f64", rest, size))
    bits = text.let("and.b64", "b64", text.let("mov.b64", "b64", quotient), "0xFFFFFFFFF8000000")
    taken = text.let("neg.f64", "f64", text.let("mov.b64", "f64", bits))
    text.do("fma.rn.f64", rest, taken, size, rest)
    text.do(f"bra {again}")
    text.label(done)
    return text.let("copysign.f64", "f64", x, rest)


TABLE.update(
    {
        **{("exp", "f32"): EXP, ("exp2", "f32"): EXP2, ("log", "f32"): LOG, ("log2", "f32"): LOG2},
        **{
            ("tanh", "f32"): TANH,
            ("erf", "f32"): ERF,
            ("pow", "f32"): _by_wide("power"),
            ("power", "f64"): POWER,
            ("pow", "f64"): POWER_WIDE,
        },
        **{(name, "f32"): _by_wide(name) for name in ("expm1", "log1p", "atan")},
        **{("sin", "f32"): sine, ("cos", "f32"): cosine, ("sin", "f64"): sine_wide, ("cos", "f64"): cosine_wide},
        **{("floor_divide", w): FLOOR_DIVIDE for w in ("f32", "f64")},
        **{("remainder", w): REMAINDER for w in ("f32", "f64")},
        **{("fmod", "f64"): fmod, ("fmod", "f32"): _by_wide("fmod")},
        **{("exp", "f64"): EXP_WIDE, ("exp2", "f64"): EXP2_WIDE, ("expm1", "f64"): EXPM1_WIDE},
        **{("log", "f64"): LOG_WIDE, ("log2", "f64"): LOG2_WIDE, ("log1p", "f64"): LOG1P_WIDE},
        **{("tanh", "f64"): TANH_WIDE, ("atan", "f64"): ATAN_WIDE, ("erf", "f64"): ERF_WIDE},
    }
)
