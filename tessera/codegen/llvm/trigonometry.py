"""Sine and cosine of f32: reduced in f64, and by the C library where an element is very large."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tessera.codegen.formulas import COSINE, SINE
from tessera.codegen.llvm.formula import Formula, call
from tessera.codegen.llvm.types import Vec

Lines = Iterator[str]
LARGE = 2.0**28  # up to here two parts of pi/2 leave the rest exact enough

# n = the nearest multiple of pi/2, f = what is left; 1.5 * 2^52 rounds to an integer in the low bits.
_REDUCE = """
t = fma d 0.63661977236758134308 6755399441055744.0
n = fsub t 6755399441055744.0
g = fma n -1.57079632679489655800 d
fd = fma n -6.12323399573676603587e-17 g
nb = bits t
"""


def sine(t: Vec) -> Lines:
    """The function ts.sin."""
    return _function("sin", t, SINE)


def cosine(t: Vec) -> Lines:
    """The function ts.cos: a quarter turn ahead."""
    return _function("cos", t, COSINE)


def _function(name: str, t: Vec, text: str) -> Lines:
    wide, i = Formula(t.of("double")), t.integer
    yield f"define internal {t} @ts.{name}.{t.suffix}({t} %x) alwaysinline #0 {{"
    yield "entry:"
    yield f"  %d = fpext {t} %x to {t.of('double')}"
    yield from _lines(wide, _REDUCE)
    yield f"  %f = fptrunc {t.of('double')} %fd to {t}"
    yield f"  %q = trunc {t.of('i64')} %nb to {i}"
    yield from _lines(Formula(t), text)
    yield f"  %a = {call('llvm.fabs', t, ['%x'])}"
    yield f"  %large = fcmp oge {t} %a, {t.const(LARGE)}"
    yield f"  %any = {_any(t)}"
    yield "  br i1 %any, label %far, label %done"
    yield "far:"
    yield f"  %exact = call {t} @ts.{name}_large.{t.suffix}({t} %x)"
    yield f"  %mixed = select {t.truth} %large, {t} %exact, {t} %small"
    yield "  br label %done"
    yield "done:"
    yield f"  %r = phi {t} [ %small, %entry ], [ %mixed, %far ]"
    yield f"  ret {t} %r"
    yield "}"


def _lines(formula: Formula, text: str) -> Lines:
    for line in text.strip().splitlines():
        yield from (f"  {each}" for each in formula.line(line))


def _any(t: Vec) -> str:
    if t.width == 1:
        return "or i1 %large, false"
    return f"call i1 @llvm.vector.reduce.or.{t.truth.suffix}({t.truth} %large)"


def widely(name: str) -> Callable[[Vec], Lines]:
    """The function for all elements by the C library's in f64; seldom called, hence never inlined."""

    def define(t: Vec) -> Lines:
        wide = t.of("double")
        yield f"define internal {t} @ts.{name}_large.{t.suffix}({t} %x) noinline #0 {{"
        yield "entry:"
        yield f"  %d = fpext {t} %x to {wide}"
        yield f"  %s = {call(f'ts.{name}', wide, ['%d'])}"
        yield f"  %r = fptrunc {wide} %s to {t}"
        yield f"  ret {t} %r"
        yield "}"

    return define
