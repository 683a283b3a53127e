"""Mathematical functions that the hardware lacks, as formulas for f32 and f64.

Polynomials are Chebyshev fits on the reduced range, of relative error below 2^-27 (f32) or 2^-58 (f64). Each result
lies within the bounds of the OpenCL full profile. Sine and cosine are reduced to a quarter turn in f64. The f64 power
keeps the logarithm and its product with y as two numbers of f64 each, within 16 ulp.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tessera.codegen.ptx.table.scalars.formula_translation import FORMULAS, FormulaTranslator, apply_formula
from tessera.codegen.ptx.text.builder import PtxBuilder
from tessera.codegen.ptx.text.register_types import literal
from tessera.codegen.scalar_functions import (
    COSINE,
    FLOOR_DIVIDE,
    LOG,
    LOG2,
    LOG_SPECIAL_CASES,
    POWER,
    POWER_SPECIAL_CASES,
    REMAINDER,
    SINE,
)

# The scalar functions of f64, as formulas: Chebyshev fits on the reduced range.


SCALE64 = """
i = sub nb 0x4338000000000000
h = ashr i 1
g = sub i h
h1 = add h 1023
g1 = add g 1023
h2 = shl h1 52
g2 = shl g1 52
hr = real h2
gr = real g2
ph = fmul p hr
r = fmul ph gr
"""
EXPM1_POLY = """
q = poly f 1.6086677666787361503e-10 2.0918212319133978201e-9 2.5052070959803661989e-8 2.7557263077309411451e-7 \
2.7557319247344509509e-6 0.000024801587336630946966 0.00019841269841263251867 0.0013888888888879003084 \
0.0083333333333333340131 0.041666666666666676865 0.16666666666666666667 0.49999999999999999998
ff = fmul f f
p0 = fma q ff f
"""
_REDUCED = """
n = fsub t 6755399441055744.0
nb = bits t
f0 = fma n -0.693147180369123816490 x2
f = fma n -1.90821492927058770002e-10 f0
"""
EXP_WIDE = (
    """
c0 = gt x 710.0
x1 = select c0 710.0 x
c1 = lt x1 -746.0
x2 = select c1 -746.0 x1
t = fma x2 1.4426950408889634074 6755399441055744.0
"""
    + _REDUCED
    + EXPM1_POLY
    + "p = fadd p0 1.0\n"
    + SCALE64
)
EXP2_WIDE = (
    """
c0 = gt x 1025.0
x1 = select c0 1025.0 x
c1 = lt x1 -1080.0
x2 = select c1 -1080.0 x1
t = fadd x2 6755399441055744.0
n = fsub t 6755399441055744.0
nb = bits t
y0 = fsub x2 n
f1 = fmul y0 0.69314718055994528623
e1 = fma y0 0.69314718055994528623 0.0
f2 = fma y0 2.3190468138462995584e-17 f1
f = fadd f2 0.0
"""
    + EXPM1_POLY
    + "p = fadd p0 1.0\n"
    + SCALE64
)
EXPM1_WIDE = (
    """
c0 = gt x 40.0
x1 = select c0 40.0 x
c1 = lt x1 -60.0
x2 = select c1 -60.0 x1
t = fma x2 1.4426950408889634074 6755399441055744.0
"""
    + _REDUCED
    + EXPM1_POLY
    + """
i = sub nb 0x4338000000000000
i1 = add i 1023
i2 = shl i1 52
s = real i2
s1 = fsub s 1.0
near = fma s p0 s1
far = exp x
r0 = select c0 far near
c2 = eq x 0.0
r = select c2 x r0
"""
)
# x = 2^k * m with m from sqrt(1/2) to sqrt(2); log m = 2 atanh((m - 1) / (m + 1)).
_LOG_WIDE = """
tiny = lt x 2.2250738585072014e-308
big = fmul x 18014398509481984.0
xs = select tiny big x
e0 = select tiny -54.0 0.0
b = bits xs
b1 = sub b 0x3FE6A09E667F3BCD
k = ashr b1 52
k1 = shl k 52
m0 = sub b k1
m = real m0
k2 = toreal k
e = fadd k2 e0
f = fsub m 1.0
d = fadd m 1.0
s = fdiv f d
z = fmul s s
q = poly z 0.11883452394107859727 0.1168796299754215568 0.13335645841949377114 0.15384574966460906823 \
0.18181818595769064684 0.22222222219844231103 0.28571428571435407599 0.3999999999999999244 0.66666666666666666668
hf = fmul f 0.5
h = fmul hf f
zq = fmul z q
hq = fadd h zq
w = fmul s hq
"""
LOG_WIDE = (
    _LOG_WIDE
    + """
w0 = fma e 1.90821492927058770002e-10 w
w1 = fsub w0 h
v0 = fadd w1 f
v = fma e 0.693147180369123816490 v0
"""
    + LOG_SPECIAL_CASES
)
LOG2_WIDE = (
    _LOG_WIDE
    + """
l0 = fsub w h
g = fma f 2.0355273740931033e-17 0.0
g1 = fma l0 1.4426950408889634074 g
v0 = fma f 1.4426950408889634074 g1
v = fadd v0 e
"""
    + LOG_SPECIAL_CASES
)
# Kahan's form: the error of 1 + x is divided out again.
LOG1P_WIDE = """
u = fadd x 1.0
d = fsub u 1.0
l = log u
lx = fmul l x
v0 = fdiv lx d
c0 = eq d 0.0
v1 = select c0 x v0
c1 = eq x inf
v2 = select c1 inf v1
c2 = eq u 0.0
v3 = select c2 -inf v2
c3 = uno l l
r = select c3 l v3
"""
TANH_WIDE = """
a = fabs x
c0 = gt a 22.0
a1 = select c0 22.0 a
a2 = fadd a1 a1
e = expm1 a2
d = fadd e 2.0
t = fdiv e d
t1 = select c0 1.0 t
s = copysign t1 x
c1 = uno x x
r = select c1 x s
"""
ATAN_WIDE = """
a = fabs x
c0 = gt a 1.0
v = fdiv 1.0 a
t0 = select c0 v a
c1 = gt t0 0.41421356237309503
tm = fsub t0 1.0
tp = fadd t0 1.0
tq = fdiv tm tp
t = select c1 tq t0
z = fmul t t
q = poly z 0.015099884864821963994 -0.033374102242899617117 0.044989082467814506045 -0.052171658995952996247 \
0.058768110261210217792 -0.066662028877461991022 0.076922809369842615855 -0.090909080516836059575 \
0.11111111085112750644 -0.1428571428532620101 0.1999999999999698366 -0.33333333333333324105
zq = fmul z q
p0 = fma zq t t
b0 = select c1 0.78539816339744830962 0.0
b1 = select c1 3.0616169978683829e-17 0.0
p1 = fadd p0 b1
p2 = fadd p1 b0
g0 = fsub 6.123233995736766e-17 p2
g1 = fadd g0 1.5707963267948965580
p3 = select c0 g1 p2
r = copysign p3 x
"""
ERF_WIDE = """
a = fabs x
c = gt a 6.0
t = select c 6.0 a
z = fmul t t
q = poly z -4.2290117089891978233e-12 8.7078349489499495257e-11 -1.2164225654817863871e-9 1.4792347499413907917e-8 \
-1.6364636604802170643e-7 1.6462045054724142774e-6 -0.000014925647549075886628 0.00012055332902288381158 \
-0.00085483270219217735285 0.0052239776254231166418 -0.026866170645129825815 0.11283791670955120172 \
-0.37612638903183752378 1.1283791670955125739
near = fmul q t
um = fsub t 2.5
up = fadd t 2.5
u = fdiv um up
g = poly u -3.1595535465715722443e-8 -5.7603130516061743533e-8 8.639939525559339012e-8 3.8895109633612845339e-7 \
7.5241830008573418442e-8 -1.8165144342459130138e-6 -2.2982975808700140261e-6 7.5551341650102105187e-6 \
0.000018614556787006241507 -0.000034182497566891251065 -0.0001288771837172816617 0.00022838039449624533132 \
0.0008759154508692198165 -0.0026423659648242363739 -0.0039937011658797690435 0.039922539075593691698 \
-0.12503305237882904278 0.25171319321744924673 -0.3717367339489733533 0.21080636406114358065
mz = fmul z -1.0
e = exp mz
eg = fmul e g
far = fsub 1.0 eg
d = gt t 1.0
v = select d far near
s = copysign v x
c1 = uno x x
r = select c1 x s
"""


# x to the power y in f64, within 16 ulp: the logarithm and its product with y in two numbers of f64 each.
#
# log2 m = 2/ln 2 (s + s^3/3 + s^5/5 + ...) for s = (m - 1)/(m + 1), of which the rest after s^3 needs no second number.


_LOG2_IN_TWO = """
a = fabs x
tiny = lt a 2.2250738585072014e-308
big = fmul a 18014398509481984.0
xs = select tiny big a
e0 = select tiny -54.0 0.0
b = bits xs
b1 = sub b 0x3FE6A09E667F3BCD
k = ashr b1 52
k1 = shl k 52
m0 = sub b k1
m = real m0
k2 = toreal k
e = fadd k2 e0
f0 = fsub m 1.0
d = fadd m 1.0
d1 = fsub d 1.0
dl = fsub m d1
s = fdiv f0 d
sn = fmul s -1.0
r0 = fma sn d f0
r1 = fma sn dl r0
sl = fdiv r1 d
z = fmul s s
zn = fmul z -1.0
z0 = fma s s zn
s2 = fadd s s
zl = fma s2 sl z0
wh = fmul z 0.3333333333333333
wn = fmul wh -1.0
w0 = fma z 0.3333333333333333 wn
w1 = fma z 1.850371707708594e-17 w0
wl = fma zl 0.3333333333333333 w1
q = poly z 0.04 0.043478260869565216 0.047619047619047616 0.05263157894736842 0.058823529411764705 \
0.06666666666666667 0.07692307692307693 0.09090909090909091 0.1111111111111111 0.14285714285714285 0.2
zz = fmul z z
p = fmul zz q
u = fadd wh p
u0 = fsub u wh
u1 = fsub p u0
ul = fadd u1 wl
gh = fadd u 1.0
g0 = fsub gh 1.0
g1 = fsub u g0
gl = fadd g1 ul
qh = fmul s gh
qn = fmul qh -1.0
q0 = fma s gh qn
q1 = fma s gl q0
ql = fma sl gh q1
lh = fmul qh 2.8853900817779268
ln = fmul lh -1.0
l0 = fma qh 2.8853900817779268 ln
l1 = fma ql 2.8853900817779268 l0
ll = fma qh 4.0710547481862066e-17 l1
h0 = fadd e lh
h1 = fsub h0 e
h2 = fsub lh h1
hl = fadd h2 ll
"""
_TIMES_Y = """
c0 = eq a 0.0
h3 = select c0 -inf h0
c1 = eq a inf
h4 = select c1 inf h3
c2 = uno x x
hh = select c2 x h4
t0 = fmul y hh
tn = fmul t0 -1.0
t1 = fma y hh tn
t2 = fma y hl t1
one = eq a 1.0
t3 = select one 0.0 t0
t4 = select one 0.0 t2
c3 = gt t3 1100.0
t5 = select c3 1100.0 t3
c4 = lt t5 -1100.0
th = select c4 -1100.0 t5
same = eq th t3
tl = select same t4 0.0
t = fadd th 6755399441055744.0
n = fsub t 6755399441055744.0
nb = bits t
y0 = fsub th n
y1 = fadd y0 tl
f = fmul y1 0.69314718055994528623
"""
POWER_WIDE = _LOG2_IN_TWO + _TIMES_Y + EXPM1_POLY + "p = fadd p0 1.0\n" + SCALE64 + "v = fabs r\n" + POWER_SPECIAL_CASES


# Sine and cosine: reduced to a quarter turn in f64, then polynomials.


# n = the nearest multiple of pi/2, f = what is left, by three parts of pi/2.
_QUARTER_TURN_REDUCTION = """
t = fma x 0.63661977236758134308 6755399441055744.0
n = fsub t 6755399441055744.0
f0 = fma n -1.57079632679489655800 x
f1 = fma n -6.12323399573676603587e-17 f0
f = fma n 1.4973849048591833e-33 f1
nb = bits t
"""
_SINE_AND_COSINE = """
z = fmul f f
sq = poly z -7.5866368828251596492e-13 1.6058530596645954712e-10 -2.5052106225994400694e-8 2.755731921932057977e-6 \
-0.00019841269841265041047 0.008333333333333331481 -0.16666666666666666665
zf = fmul z f
sv = fma zf sq f
cq = poly z 4.7458384125310229648e-14 -1.1470460319209511842e-11 2.0876755787492605948e-9 -2.7557319221392490652e-7 \
0.000024801587301584633141 -0.0013888888888888887859 0.041666666666666666666
zz = fmul z z
ch = fma z -0.5 1.0
cv = fma cq zz ch
q = and nb 3
q1 = and q 1
odd = ieq q1 1
"""
_QUADRANT_SIGN = """
q2 = and s 2
q3 = shl q2 62
vb = bits v
vs = xor vb q3
r = real vs
"""
SINE_WIDE = _QUARTER_TURN_REDUCTION + _SINE_AND_COSINE + "v = select odd cv sv\ns = add q 0" + _QUADRANT_SIGN
COSINE_WIDE = _QUARTER_TURN_REDUCTION + _SINE_AND_COSINE + "v = select odd sv cv\ns = add q 1" + _QUADRANT_SIGN


def emit_sine(text: PtxBuilder, x: str) -> str:
    """The sine of an f32."""
    return _emit_f32(text, x, SINE)


def emit_cosine(text: PtxBuilder, x: str) -> str:
    """The cosine of an f32: the sine a quarter turn on."""
    return _emit_f32(text, x, COSINE)


def _emit_f32(text: PtxBuilder, x: str, formula: str) -> str:
    wide = FormulaTranslator(text, "f64", {"x": text.let("cvt.f64.f32", "f64", x)})
    _translate_lines(wide, _QUARTER_TURN_REDUCTION)
    rest = text.let("cvt.rn.f32.f64", "f32", wide.names["f"])
    quarter = text.let("cvt.u32.u64", "b32", wide.names["nb"])
    narrow = FormulaTranslator(text, "f32", {"x": x, "f": rest, "q": quarter})
    _translate_lines(narrow, formula)
    return narrow.names["small"]


def emit_sine_f64(text: PtxBuilder, x: str) -> str:
    """The sine of an f64."""
    return _emit_f64(text, x, SINE_WIDE)


def emit_cosine_f64(text: PtxBuilder, x: str) -> str:
    """The cosine of an f64."""
    return _emit_f64(text, x, COSINE_WIDE)


def _emit_f64(text: PtxBuilder, x: str, formula: str) -> str:
    found = FormulaTranslator(text, "f64", {"x": x})
    _translate_lines(found, formula)
    return found.names["r"]


def _translate_lines(formula: FormulaTranslator, lines: str) -> None:
    for line in lines.split("\n"):
        if line:
            formula.line(line)


# The scalar functions that the hardware has not: the table of formulas, and those of f32.
#
# Polynomials are Chebyshev fits on the reduced range, of relative error below 2^-27 (f32) or 2^-58 (f64). Each result
# lies within the bounds of the OpenCL full profile; `tests/codegen/ptx/test_functions.py` measures them.


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


def _through_f64(name: str) -> Callable[..., str]:
    """A function of f32 by way of the one of f64: rounded once, and so within an ulp."""

    def define(text: PtxBuilder, *operands: str) -> str:
        wide = [text.let("cvt.f64.f32", "f64", x) for x in operands]
        return text.let("cvt.rn.f32.f64", "f32", apply_formula(text, name, "f64", *wide))

    return define


def emit_fmod(text: PtxBuilder, x: str, y: str) -> str:
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


FORMULAS.update(
    {
        **{("exp", "f32"): EXP, ("exp2", "f32"): EXP2, ("log", "f32"): LOG, ("log2", "f32"): LOG2},
        **{
            ("tanh", "f32"): TANH,
            ("erf", "f32"): ERF,
            ("pow", "f32"): _through_f64("power"),
            ("power", "f64"): POWER,
            ("pow", "f64"): POWER_WIDE,
        },
        **{(name, "f32"): _through_f64(name) for name in ("expm1", "log1p", "atan")},
        **{
            ("sin", "f32"): emit_sine,
            ("cos", "f32"): emit_cosine,
            ("sin", "f64"): emit_sine_f64,
            ("cos", "f64"): emit_cosine_f64,
        },
        **{("floor_divide", w): FLOOR_DIVIDE for w in ("f32", "f64")},
        **{("remainder", w): REMAINDER for w in ("f32", "f64")},
        **{("fmod", "f64"): emit_fmod, ("fmod", "f32"): _through_f64("fmod")},
        **{("exp", "f64"): EXP_WIDE, ("exp2", "f64"): EXP2_WIDE, ("expm1", "f64"): EXPM1_WIDE},
        **{("log", "f64"): LOG_WIDE, ("log2", "f64"): LOG2_WIDE, ("log1p", "f64"): LOG1P_WIDE},
        **{("tanh", "f64"): TANH_WIDE, ("atan", "f64"): ATAN_WIDE, ("erf", "f64"): ERF_WIDE},
    }
)
