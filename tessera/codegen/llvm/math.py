"""The scalar functions: which ones a text calls, and their definitions.

f32 functions are written out in `formulas`; of f64 each element goes to the C library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from tessera.codegen.formulas import DOUBLE, EITHER, SINGLE
from tessera.codegen.llvm.formula import call, function
from tessera.codegen.llvm.trigonometry import cosine, sine, widely
from tessera.codegen.llvm.types import Vec

Lines = Iterator[str]
_CALLED = re.compile(r"@ts\.(?P<name>[a-z_]\w*)\.(?:v(?P<width>\d+))?f(?P<bits>32|64)\(")
BINARY = ("pow", "floor_divide", "remainder", "power")
# What the C library calls those that are no intrinsics of LLVM.
LIBRARY = {name: name for name in ("erf", "expm1", "log1p", "atan")}


def definitions(lines: Iterable[str]) -> list[str]:
    """The functions that lines call, and those that these call."""
    made: dict[str, list[str]] = {}
    waiting = list(lines)
    while waiting:
        line = waiting.pop()
        for found in _CALLED.finditer(line) if " call " in line else ():
            whole = found[0][:-1]
            if whole not in made:
                made[whole] = list(_definition(found["name"], _type(found["width"], found["bits"])))
                waiting += made[whole]
    return [line for name in sorted(made) for line in [*made[name], ""]]


def _type(width: str | None, bits: str) -> Vec:
    return Vec("float" if bits == "32" else "double", int(width or 1))


def _definition(name: str, t: Vec) -> Lines:
    special = SPECIAL.get((name, t.element))
    if special is not None:
        return special(t)
    table = SINGLE if t.element == "float" else DOUBLE
    text = EITHER.get(name) or table.get(name)
    return function(name, t, text, 1 + (name in BINARY)) if text else _library(name, t)


def _library(name: str, t: Vec) -> Lines:
    """A function of the C library, element by element."""
    one = Vec(t.element)
    operands = "xy"[: 1 + (name in BINARY)]
    yield f"define internal {t} @ts.{name}.{t.suffix}({', '.join(f'{t} %{x}' for x in operands)}) #0 {{"
    yield "entry:"
    if t.width == 1:
        yield f"  %r = {_library_call(name, one, [f'%{x}' for x in operands])}"
        yield f"  ret {t} %r"
    else:
        for n in range(t.width):
            for x in operands:
                yield f"  %{x}{n} = extractelement {t} %{x}, i64 {n}"
            yield f"  %r{n} = {_library_call(name, one, [f'%{x}{n}' for x in operands])}"
            yield f"  %v{n} = insertelement {t} {'poison' if n == 0 else f'%v{n - 1}'}, {one} %r{n}, i64 {n}"
        yield f"  ret {t} %v{t.width - 1}"
    yield "}"


def _library_call(name: str, one: Vec, operands: list[str]) -> str:
    if name in LIBRARY:
        return f"call {one} @{LIBRARY[name]}({', '.join(f'{one} {x}' for x in operands)})"
    return call(f"llvm.{name}", one, operands)


def _pow(t: Vec) -> Lines:
    """x to the power y in f64, which has the digits to spare that f32 lacks."""
    wide = t.of("double")
    yield f"define internal {t} @ts.pow.{t.suffix}({t} %x, {t} %y) alwaysinline #0 {{"
    yield "entry:"
    yield f"  %a = fpext {t} %x to {wide}"
    yield f"  %b = fpext {t} %y to {wide}"
    yield f"  %p = {call('ts.power', wide, ['%a', '%b'])}"
    yield f"  %r = fptrunc {wide} %p to {t}"
    yield f"  ret {t} %r"
    yield "}"


def _doubled(name: str) -> Callable[[Vec], Lines]:
    """A function of f32 by way of the one of f64: rounded once, and so within an ulp."""

    def define(t: Vec) -> Lines:
        wide = t.of("double")
        yield f"define internal {t} @ts.{name}.{t.suffix}({t} %x) alwaysinline #0 {{"
        yield "entry:"
        yield f"  %a = fpext {t} %x to {wide}"
        yield f"  %b = {call(f'ts.{name}', wide, ['%a'])}"
        yield f"  %r = fptrunc {wide} %b to {t}"
        yield f"  ret {t} %r"
        yield "}"

    return define


SPECIAL: dict[tuple[str, str], Callable[[Vec], Lines]] = {
    ("pow", "float"): _pow,
    **{(name, "float"): _doubled(name) for name in ("expm1", "log1p", "atan")},
    ("sin", "float"): sine,
    ("cos", "float"): cosine,
    ("sin_large", "float"): widely("sin"),
    ("cos_large", "float"): widely("cos"),
}
