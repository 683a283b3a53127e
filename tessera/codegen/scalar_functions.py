"""Scalar functions as formulas in a small notation, one operation a line, which each generator translates.

    t = fma x 1.5 y        floats: fadd fsub fmul fdiv frem fma fabs floor trunc sqrt copysign
    p = poly x 3.0 2.0 1.0 a polynomial, highest power first
    c = lt x 1.0           comparisons: lt gt le ge eq ne uno (floats), ieq ilt igt (integers)
    i = bits x             integers of the same width: bits real toreal add sub and or xor shl ashr lshr
    s = select c x y       (iselect for integers; band bor bxor for conditions)
    e = exp x              any other word calls the function of that name
    d = wide x             f32 to f64; `narrow` back

A function takes x (and y) and gives r. Polynomials are minimax fits (Lawson's iteration, relative error below 2^-27) on
the reduced range. Each result lies within the bounds of the OpenCL full profile; `tests/codegen/test_math.py` measures.
"""

from __future__ import annotations

# The scalar functions in the notation of `codegen/notation.py`, as every generator has them.
#
# Polynomials are minimax fits (Lawson's iteration, relative error below 2^-27) on the reduced range.
# Each result lies within the bounds of the OpenCL full profile; `tests/codegen/test_math.py` measures them.


# 1.5 * 2^23: added to a float below 2^22 it leaves the nearest integer in the low bits of the mantissa.
ROUND_TO_INTEGER, ROUND_TO_INTEGER_BITS = "12582912.0", "0x4B400000"

# p * 2^n, in two steps so that neither factor leaves the range of normal numbers.
_SCALE_BY_POWER_OF_TWO = f"""
i = sub nb {ROUND_TO_INTEGER_BITS}
h = ashr i 1
g = sub i h
h1 = add h 127
g1 = add g 127
h2 = shl h1 23
g2 = shl g1 23
hr = real h2
gr = real g2
ph = fmul p hr
r = fmul ph gr
"""

EXP = (
    f"""
high = gt x 89.0
x1 = select high 89.0 x
low = lt x1 -104.0
x2 = select low -104.0 x1
t = fma x2 1.44269504 {ROUND_TO_INTEGER}
nb = bits t
n = fsub t {ROUND_TO_INTEGER}
f0 = fma n -0.693145751953125 x2
f = fma n -1.42860682030941723212e-6 f0
q = poly f 0.00138131448 0.00836941879 0.041668456 0.166665152 0.49999994
ff = fmul f f
s = fma q ff f
p = fadd s 1.0
"""
    + _SCALE_BY_POWER_OF_TWO
)

EXP2 = (
    f"""
high = gt x 130.0
x1 = select high 130.0 x
low = lt x1 -152.0
x2 = select low -152.0 x1
t = fadd x2 {ROUND_TO_INTEGER}
nb = bits t
n = fsub t {ROUND_TO_INTEGER}
f = fsub x2 n
q = poly f 0.000153523171 0.00134001707 0.00961844996 0.0555032939 0.240226477 0.693147182
s = fmul q f
p = fadd s 1.0
"""
    + _SCALE_BY_POWER_OF_TWO
)

# x = 2^e * (1 + f) with 1 + f from sqrt(1/2) to sqrt(2); w = log(1 + f) - f.
_LOG = """
tiny = lt x 1.17549435e-38
big = fmul x 8388608.0
xs = select tiny big x
e0 = select tiny -23.0 0.0
b = bits xs
b1 = sub b 0x3F3504F3
k = ashr b1 23
k1 = shl k 23
m0 = sub b k1
m = real m0
k2 = toreal k
e = fadd k2 e0
f = fsub m 1.0
q = poly f 0.0674663857 -0.116756514 0.118881628 -0.124055892 0.142195523 -0.166679963 0.200021192 \
-0.250000089 0.333333135
s = fmul f f
sf = fmul s f
"""
LOG_SPECIAL_CASES = """
c0 = lt x 0.0
r0 = select c0 nan v
c1 = eq x 0.0
r1 = select c1 -inf r0
c2 = eq x inf
r2 = select c2 inf r1
c3 = uno x x
r = select c3 x r2
"""

LOG = (
    _LOG
    + """
w0 = fmul sf q
w1 = fma e -2.12194440e-4 w0
w2 = fma s -0.5 w1
v0 = fadd f w2
v = fma e 0.693359375 v0
"""
    + LOG_SPECIAL_CASES
)

# log2(e) = 1 + 0.44269504: the 1 is added without rounding error.
LOG2 = (
    _LOG
    + """
w0 = fmul sf q
w = fma s -0.5 w0
v0 = fmul w 0.44269504088896340736
v1 = fma f 0.44269504088896340736 v0
v2 = fadd v1 w
v3 = fadd v2 f
v = fadd v3 e
"""
    + LOG_SPECIAL_CASES
)

TANH = """
a = fabs x
z = fmul x x
q = poly z -0.00569351809 0.0206304099 -0.0537376143 0.133314252 -0.333332807
zx = fmul z x
close = fma q zx x
near = copysign close x
a2 = fadd a a
ex = exp a2
e1 = fadd ex 1.0
d = fdiv 2.0 e1
o = fsub 1.0 d
far = copysign o x
c = lt a 0.625
r = select c near far
"""

# The fit of N. Juffa: 1 - exp(polynomial) beyond 0.9277, an odd polynomial below.
ERF = """
a = fabs x
c = gt a 4.0
t = select c 4.0 a
s = fmul t t
u0 = fma -1.72853470e-5 t 3.83197126e-4
u1 = fma -3.88396438e-3 t 2.42546219e-2
p0 = fma u0 s u1
p1 = poly t p0 -1.06777877e-1 -6.34846687e-1 -1.28717512e-1
nt = fmul t -1.0
p2 = fma p1 t nt
ex = exp p2
o = fsub 1.0 ex
far = copysign o x
q = poly s -5.96761703e-4 4.99119423e-3 -2.67681349e-2 1.12819925e-1 -3.76125336e-1 1.28379166e-1
near = fma q x x
d = gt a 0.927734375
r = select d far near
"""

# v = |x| to the power y; the sign, and what C says of special operands.
POWER_SPECIAL_CASES = """
half = fmul y 0.5
fy = floor y
whole = eq fy y
fh = floor half
uneven = ne fh half
odd = band whole uneven
minus = fmul v -1.0
xb = bits x
neg = ilt xb 0
flip = band neg odd
v1 = select flip minus v
below = lt x 0.0
part = ne fy y
bad0 = band below part
real_base = lt a inf
bad = band bad0 real_base
v2 = select bad nan v1
ny = uno y y
v3 = select ny y v2
c5 = eq x 1.0
v4 = select c5 1.0 v3
c6 = eq y 0.0
r = select c6 1.0 v4
"""
# x to the power y in f64, precise enough to round to f32.
POWER = (
    """
a = fabs x
b = bits a
b1 = sub b 0x3FE6A09E667F3BCD
k = ashr b1 52
k1 = shl k 52
m0 = sub b k1
m = real m0
e = toreal k
mn = fsub m 1.0
mp = fadd m 1.0
s = fdiv mn mp
z = fmul s s
q = poly z 0.19235933878519512 0.22195308321368668 0.26230818925253878 0.32059889797532520 \
0.41219858311113240 0.57707801635558536 0.96179669392597560 2.8853900817779268
l0 = fma s q e
c0 = eq a 0.0
l1 = select c0 -inf l0
c1 = eq a inf
l2 = select c1 inf l1
c2 = uno x x
l = select c2 x l2
w0 = fmul y l
one = eq a 1.0
w1 = select one 0.0 w0
c3 = gt w1 1000.0
w2 = select c3 1000.0 w1
c4 = lt w2 -1000.0
w = select c4 -1000.0 w2
t = fadd w 6755399441055744.0
nb = bits t
n = fsub t 6755399441055744.0
f = fsub w n
p = poly f 4.4455382718708e-10 7.054911620801121e-09 1.01780860092396997e-07 1.32154867901443095e-06 \
1.52527338040598403e-05 1.54035303933816100e-04 1.33335581464284434e-03 9.61812910762847716e-03 \
5.55041086648215800e-02 2.40226506959100712e-01 6.93147180559945309e-01 1.0
i = sub nb 0x4338000000000000
i1 = add i 1023
i2 = shl i1 52
sc = real i2
v = fmul p sc
"""
    + POWER_SPECIAL_CASES
)

# As NumPy: the quotient of what the remainder leaves, so that the two agree.
_REMAINDER = """
m0 = frem x y
nz = ne m0 0.0
yn = lt y 0.0
mn = lt m0 0.0
dif = bxor yn mn
fix = band nz dif
m1 = fadd m0 y
m2 = select fix m1 m0
zero = copysign 0.0 y
iz = eq m2 0.0
m = select iz zero m2
"""
REMAINDER = _REMAINDER + "r = fadd m -0.0"
FLOOR_DIVIDE = (
    _REMAINDER
    + """
d0 = fsub x m0
d1 = fdiv d0 y
d2 = fsub d1 1.0
d3 = select fix d2 d1
fl = floor d3
gap = fsub d3 fl
more = gt gap 0.5
f1 = fadd fl 1.0
f2 = select more f1 fl
plain = fdiv x y
z0 = copysign 0.0 plain
none = eq d3 0.0
f3 = select none z0 f2
by0 = eq y 0.0
r = select by0 plain f3
"""
)

# The sine and cosine of f, what is left of x after q quarter turns, by two polynomials of f.
_QUADRANT_POLYNOMIALS = """
z = fmul f f
sq = poly z 2.71756448e-06 -0.000198392561 0.00833332911 -0.166666672 1.0
sv = fmul sq f
cq = poly z -2.7203302e-07 2.47994358e-05 -0.00138888834 0.0416666679
zz = fmul z z
ch = fma z -0.5 1.0
cv = fma cq zz ch
q1 = and q 1
odd = ieq q1 1
"""
_QUADRANT_SIGN = """
q2 = and s 2
q3 = shl q2 30
vb = bits v
vs = xor vb q3
small = real vs
"""
# The cosine is the sine one quarter on: its sign changes at the second and third quarters.
SINE = _QUADRANT_POLYNOMIALS + "v = select odd cv sv\ns = add q 0" + _QUADRANT_SIGN
COSINE = _QUADRANT_POLYNOMIALS + "v = select odd sv cv\ns = add q 1" + _QUADRANT_SIGN


F32_FORMULAS = {"exp": EXP, "exp2": EXP2, "log": LOG, "log2": LOG2, "tanh": TANH, "erf": ERF}
F64_FORMULAS = {"power": POWER}
FLOAT_FORMULAS = {"remainder": REMAINDER, "floor_divide": FLOOR_DIVIDE}


# A notation for scalar functions, one operation a line, that each generator translates to its own text.
#
#     t = fma x 1.5 y        floats: fadd fsub fmul fdiv frem fma fabs floor trunc sqrt copysign
#     p = poly x 3.0 2.0 1.0 a polynomial, highest power first
#     c = lt x 1.0           comparisons: lt gt le ge eq ne uno (floats), ieq ilt igt (integers)
#     i = bits x             integers of the same width: bits real toreal add sub and or xor shl ashr lshr
#     s = select c x y       (iselect for integers; band bor bxor for conditions)
#     e = exp x              any other word calls the function of that name
#     d = wide x             f32 to f64; `narrow` back
#
# A function of this notation takes x (and y) and gives r.


def parse_formula_line(text: str) -> tuple[str, str, list[str]]:
    """The result, the word and the operands of a line."""
    name, _, rest = text.partition("=")
    word, *operands = rest.split()
    return name.strip(), word, operands
