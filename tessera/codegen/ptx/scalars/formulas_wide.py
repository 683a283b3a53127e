"""The scalar functions of f64, as formulas: Chebyshev fits on the reduced range."""

from __future__ import annotations

from tessera.codegen.formulas import LOG_ENDS

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
    + LOG_ENDS
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
    + LOG_ENDS
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
