"""Sine and cosine: reduced to a quarter turn in f64, then polynomials."""

from __future__ import annotations

from tessera.codegen.formulas import COSINE, SINE
from tessera.codegen.ptx.scalars.formula import Formula
from tessera.codegen.ptx.text import Text

# n = the nearest multiple of pi/2, f = what is left, by three parts of pi/2.
_REDUCE = """
t = fma x 0.63661977236758134308 6755399441055744.0
n = fsub t 6755399441055744.0
f0 = fma n -1.57079632679489655800 x
f1 = fma n -6.12323399573676603587e-17 f0
f = fma n 1.4973849048591833e-33 f1
nb = bits t
"""
_BOTH = """
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
_SIGN = """
q2 = and s 2
q3 = shl q2 62
vb = bits v
vs = xor vb q3
r = real vs
"""
SINE_WIDE = _REDUCE + _BOTH + "v = select odd cv sv\ns = add q 0" + _SIGN
COSINE_WIDE = _REDUCE + _BOTH + "v = select odd sv cv\ns = add q 1" + _SIGN


def sine(text: Text, x: str) -> str:
    """The sine of an f32."""
    return _narrow(text, x, SINE)


def cosine(text: Text, x: str) -> str:
    """The cosine of an f32: the sine a quarter turn on."""
    return _narrow(text, x, COSINE)


def _narrow(text: Text, x: str, formula: str) -> str:
    wide = Formula(text, "f64", {"x": text.let("cvt.f64.f32", "f64", x)})
    _run(wide, _REDUCE)
    rest = text.let("cvt.rn.f32.f64", "f32", wide.names["f"])
    quarter = text.let("cvt.u32.u64", "b32", wide.names["nb"])
    narrow = Formula(text, "f32", {"x": x, "f": rest, "q": quarter})
    _run(narrow, formula)
    return narrow.names["small"]


def sine_wide(text: Text, x: str) -> str:
    """The sine of an f64."""
    return _wide(text, x, SINE_WIDE)


def cosine_wide(text: Text, x: str) -> str:
    """The cosine of an f64."""
    return _wide(text, x, COSINE_WIDE)


def _wide(text: Text, x: str, formula: str) -> str:
    found = Formula(text, "f64", {"x": x})
    _run(found, formula)
    return found.names["r"]


def _run(formula: Formula, lines: str) -> None:
    for line in lines.split("\n"):
        if line:
            formula.line(line)
