"""x to the power y in f64, within 16 ulp: the logarithm and its product with y in two numbers of f64 each.

log2 m = 2/ln 2 (s + s^3/3 + s^5/5 + ...) for s = (m - 1)/(m + 1), of which the rest after s^3 needs no second number.
"""

from __future__ import annotations

from tessera.codegen.formulas import POWER_ENDS
from tessera.codegen.ptx.scalars.formulas_wide import EXPM1_POLY, SCALE64

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
POWER_WIDE = _LOG2_IN_TWO + _TIMES_Y + EXPM1_POLY + "p = fadd p0 1.0\n" + SCALE64 + "v = fabs r\n" + POWER_ENDS
