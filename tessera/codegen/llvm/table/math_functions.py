"""Math functions: definitions of the scalar functions that a text calls, for any vector width.

f32 functions are formulas of `scalar_functions`, inlined; sine and cosine reduce their argument in f64. Of f64 each
element
goes to the C library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator

from tessera.codegen.llvm.text.types import RegisterType
from tessera.codegen.scalar_functions import (
    COSINE,
    F32_FORMULAS,
    F64_FORMULAS,
    FLOAT_FORMULAS,
    SINE,
    parse_formula_line,
)

# The notation of formulas (`codegen/notation.py`) as LLVM, for any vector width: a word is a call of ts.<word>.


FormulaLines = Iterator[str]

FLOAT_WORDS = {"fadd", "fsub", "fmul", "fdiv", "frem"}
INTRINSIC_WORDS = {"fma", "fabs", "floor", "trunc", "sqrt", "copysign"}
INTEGER_WORDS = {"add", "sub", "and", "or", "xor", "shl", "ashr", "lshr"}
CONDITION_WORDS = {"band": "and", "bor": "or", "bxor": "xor"}
COMPARE_WORDS = {"lt": "olt", "gt": "ogt", "le": "ole", "ge": "oge", "eq": "oeq", "ne": "une", "uno": "uno"}
INTEGER_COMPARE_WORDS = {"ieq": "eq", "ilt": "slt", "igt": "sgt"}


class LlvmFormula:
    """The translation of one function's lines: it knows the type of each name."""

    def __init__(self, t: RegisterType) -> None:
        self.t, self.i, self.b = t, t.integer, t.truth

    def line(self, text: str) -> FormulaLines:
        """A line of the notation as lines of LLVM."""
        name, word, operands = parse_formula_line(text)
        d = f"%{name}"
        for words, rule in FORMULA_RULES:
            if word in words:
                yield from rule(self, d, word, operands)
                return
        yield f"{d} = {format_function_call(f'ts.{word}', self.t, [self.float(x) for x in operands])}"

    def float(self, x: str) -> str:
        """An operand that is a float."""
        return format_operand(self.t, x)

    def integer(self, x: str) -> str:
        """An operand that is an integer."""
        return format_operand(self.i, x)


def format_operand(t: RegisterType, x: str) -> str:
    """A name or a number as an operand of a type."""
    if x[0].isalpha() and x not in ("inf", "nan"):
        return f"%{x}"
    return t.const(float(x) if t.is_float else int(x, 0))


def format_function_call(name: str, t: RegisterType, operands: list[str]) -> str:
    """A call whose operands and result have one type."""
    return f"call {t} @{name}.{t.suffix}({', '.join(f'{t} {x}' for x in operands)})"


def _translate_float(f: LlvmFormula, d: str, word: str, xs: list[str]) -> FormulaLines:
    a, b = (f.float(x) for x in xs)
    yield f"{d} = {word} {f.t} {a}, {b}"


def _translate_intrinsic(f: LlvmFormula, d: str, word: str, xs: list[str]) -> FormulaLines:
    yield f"{d} = {format_function_call(f'llvm.{word}', f.t, [f.float(x) for x in xs])}"


def _translate_integer(f: LlvmFormula, d: str, word: str, xs: list[str]) -> FormulaLines:
    a, b = (f.integer(x) for x in xs)
    yield f"{d} = {word} {f.i} {a}, {b}"


def _translate_condition(f: LlvmFormula, d: str, word: str, xs: list[str]) -> FormulaLines:
    yield f"{d} = {CONDITION_WORDS[word]} {f.b} %{xs[0]}, %{xs[1]}"


def _translate_compare(f: LlvmFormula, d: str, word: str, xs: list[str]) -> FormulaLines:
    a, b = (f.float(x) for x in xs)
    yield f"{d} = fcmp {COMPARE_WORDS[word]} {f.t} {a}, {b}"


def _translate_integer_compare(f: LlvmFormula, d: str, word: str, xs: list[str]) -> FormulaLines:
    a, b = (f.integer(x) for x in xs)
    yield f"{d} = icmp {INTEGER_COMPARE_WORDS[word]} {f.i} {a}, {b}"


def _translate_select(f: LlvmFormula, d: str, word: str, xs: list[str]) -> FormulaLines:
    t, get = (f.t, f.float) if word == "select" else (f.i, f.integer)
    yield f"{d} = select {f.b} %{xs[0]}, {t} {get(xs[1])}, {t} {get(xs[2])}"


def _translate_convert(f: LlvmFormula, d: str, word: str, xs: list[str]) -> FormulaLines:
    if word == "bits":
        yield f"{d} = bitcast {f.t} {f.float(xs[0])} to {f.i}"
    else:
        yield f"{d} = {'bitcast' if word == 'real' else 'sitofp'} {f.i} {f.integer(xs[0])} to {f.t}"


def _translate_width(f: LlvmFormula, d: str, word: str, xs: list[str]) -> FormulaLines:
    one, other = f.t.of("float"), f.t.of("double")
    if word == "wide":
        yield f"{d} = fpext {one} %{xs[0]} to {other}"
    else:
        yield f"{d} = fptrunc {other} %{xs[0]} to {one}"


def _translate_polynomial(f: LlvmFormula, d: str, word: str, xs: list[str]) -> FormulaLines:
    x, first, *rest = xs
    total = f.float(first)
    for n, c in enumerate(rest):
        name = d if n == len(rest) - 1 else f"{d}.{n}"
        yield f"{name} = {format_function_call('llvm.fma', f.t, [total, f.float(x), f.float(c)])}"
        total = name


FormulaRule = Callable[[LlvmFormula, str, str, list[str]], FormulaLines]
FORMULA_RULES: tuple[tuple[Container[str], FormulaRule], ...] = (
    (FLOAT_WORDS, _translate_float),
    (INTRINSIC_WORDS, _translate_intrinsic),
    (INTEGER_WORDS, _translate_integer),
    (CONDITION_WORDS, _translate_condition),
    (COMPARE_WORDS, _translate_compare),
    (INTEGER_COMPARE_WORDS, _translate_integer_compare),
    ({"select", "iselect"}, _translate_select),
    ({"bits", "real", "toreal"}, _translate_convert),
    ({"wide", "narrow"}, _translate_width),
    ({"poly"}, _translate_polynomial),
)


def define_formula_function(name: str, t: RegisterType, text: str, operands: int = 1) -> FormulaLines:
    """The definition of a function written in the notation."""
    params = ", ".join(f"{t} %{x}" for x in "xy"[:operands])
    formula = LlvmFormula(t)
    yield f"define internal {t} @ts.{name}.{t.suffix}({params}) alwaysinline #0 {{"
    yield "entry:"
    yield from (f"  {each}" for line in text.split("\n") if line for each in formula.line(line))
    yield f"  ret {t} %r"
    yield "}"


# Sine and cosine of f32: reduced in f64, and by the C library where an element is very large.


TrigonometryLines = Iterator[str]
LARGE_ARGUMENT = 2.0**28  # up to here two parts of pi/2 leave the rest exact enough

# n = the nearest multiple of pi/2, f = what is left; 1.5 * 2^52 rounds to an integer in the low bits.
_RANGE_REDUCTION = """
t = fma d 0.63661977236758134308 6755399441055744.0
n = fsub t 6755399441055744.0
g = fma n -1.57079632679489655800 d
fd = fma n -6.12323399573676603587e-17 g
nb = bits t
"""


def define_sine(t: RegisterType) -> TrigonometryLines:
    """The function ts.sin."""
    return _define_trigonometric("sin", t, SINE)


def define_cosine(t: RegisterType) -> TrigonometryLines:
    """The function ts.cos: a quarter turn ahead."""
    return _define_trigonometric("cos", t, COSINE)


def _define_trigonometric(name: str, t: RegisterType, text: str) -> TrigonometryLines:
    wide, i = LlvmFormula(t.of("double")), t.integer
    yield f"define internal {t} @ts.{name}.{t.suffix}({t} %x) alwaysinline #0 {{"
    yield "entry:"
    yield f"  %d = fpext {t} %x to {t.of('double')}"
    yield from _translate_formula(wide, _RANGE_REDUCTION)
    yield f"  %f = fptrunc {t.of('double')} %fd to {t}"
    yield f"  %q = trunc {t.of('i64')} %nb to {i}"
    yield from _translate_formula(LlvmFormula(t), text)
    yield f"  %a = {format_function_call('llvm.fabs', t, ['%x'])}"
    yield f"  %large = fcmp oge {t} %a, {t.const(LARGE_ARGUMENT)}"
    yield f"  %any = {_emit_any_lane(t)}"
    yield "  br i1 %any, label %far, label %done"
    yield "far:"
    yield f"  %exact = call {t} @ts.{name}_large.{t.suffix}({t} %x)"
    yield f"  %mixed = select {t.truth} %large, {t} %exact, {t} %small"
    yield "  br label %done"
    yield "done:"
    yield f"  %r = phi {t} [ %small, %entry ], [ %mixed, %far ]"
    yield f"  ret {t} %r"
    yield "}"


def _translate_formula(formula: LlvmFormula, text: str) -> TrigonometryLines:
    for line in text.strip().splitlines():
        yield from (f"  {each}" for each in formula.line(line))


def _emit_any_lane(t: RegisterType) -> str:
    if t.width == 1:
        return "or i1 %large, false"
    return f"call i1 @llvm.vector.reduce.or.{t.truth.suffix}({t.truth} %large)"


def define_for_large_arguments(name: str) -> Callable[[RegisterType], TrigonometryLines]:
    """The function for all elements by the C library's in f64; seldom called, hence never inlined."""

    def define(t: RegisterType) -> TrigonometryLines:
        wide = t.of("double")
        yield f"define internal {t} @ts.{name}_large.{t.suffix}({t} %x) noinline #0 {{"
        yield "entry:"
        yield f"  %d = fpext {t} %x to {wide}"
        yield f"  %s = {format_function_call(f'ts.{name}', wide, ['%d'])}"
        yield f"  %r = fptrunc {wide} %s to {t}"
        yield f"  ret {t} %r"
        yield "}"

    return define


# The scalar functions: which ones a text calls, and their definitions.
#
# f32 functions are written out in `formulas`; of f64 each element goes to the C library.


Lines = Iterator[str]
_CALL_PATTERN = re.compile(r"@ts\.(?P<name>[a-z_]\w*)\.(?:v(?P<width>\d+))?f(?P<bits>32|64)\(")
BINARY_FUNCTIONS = ("pow", "floor_divide", "remainder", "power")
# What the C library calls those that are no intrinsics of LLVM.
LIBC_NAMES = {name: name for name in ("erf", "expm1", "log1p", "atan")}


def define_called_functions(lines: Iterable[str]) -> list[str]:
    """The functions that lines call, and those that these call."""
    made: dict[str, list[str]] = {}
    waiting = list(lines)
    while waiting:
        line = waiting.pop()
        for found in _CALL_PATTERN.finditer(line) if " call " in line else ():
            whole = found[0][:-1]
            if whole not in made:
                made[whole] = list(_define(found["name"], _parse_suffix(found["width"], found["bits"])))
                waiting += made[whole]
    return [line for name in sorted(made) for line in [*made[name], ""]]


def _parse_suffix(width: str | None, bits: str) -> RegisterType:
    return RegisterType("float" if bits == "32" else "double", int(width or 1))


def _define(name: str, t: RegisterType) -> Lines:
    special = SPECIAL_DEFINITIONS.get((name, t.element))
    if special is not None:
        return special(t)
    table = F32_FORMULAS if t.element == "float" else F64_FORMULAS
    text = FLOAT_FORMULAS.get(name) or table.get(name)
    return define_formula_function(name, t, text, 1 + (name in BINARY_FUNCTIONS)) if text else _define_by_libc(name, t)


def _define_by_libc(name: str, t: RegisterType) -> Lines:
    """A function of the C library, element by element."""
    one = RegisterType(t.element)
    operands = "xy"[: 1 + (name in BINARY_FUNCTIONS)]
    yield f"define internal {t} @ts.{name}.{t.suffix}({', '.join(f'{t} %{x}' for x in operands)}) #0 {{"
    yield "entry:"
    if t.width == 1:
        yield f"  %r = {_format_libc_call(name, one, [f'%{x}' for x in operands])}"
        yield f"  ret {t} %r"
    else:
        for n in range(t.width):
            for x in operands:
                yield f"  %{x}{n} = extractelement {t} %{x}, i64 {n}"
            yield f"  %r{n} = {_format_libc_call(name, one, [f'%{x}{n}' for x in operands])}"
            yield f"  %v{n} = insertelement {t} {'poison' if n == 0 else f'%v{n - 1}'}, {one} %r{n}, i64 {n}"
        yield f"  ret {t} %v{t.width - 1}"
    yield "}"


def _format_libc_call(name: str, one: RegisterType, operands: list[str]) -> str:
    if name in LIBC_NAMES:
        return f"call {one} @{LIBC_NAMES[name]}({', '.join(f'{one} {x}' for x in operands)})"
    return format_function_call(f"llvm.{name}", one, operands)


def _define_pow(t: RegisterType) -> Lines:
    """x to the power y in f64, which has the digits to spare that f32 lacks."""
    wide = t.of("double")
    yield f"define internal {t} @ts.pow.{t.suffix}({t} %x, {t} %y) alwaysinline #0 {{"
    yield "entry:"
    yield f"  %a = fpext {t} %x to {wide}"
    yield f"  %b = fpext {t} %y to {wide}"
    yield f"  %p = {format_function_call('ts.power', wide, ['%a', '%b'])}"
    yield f"  %r = fptrunc {wide} %p to {t}"
    yield f"  ret {t} %r"
    yield "}"


def _define_through_f64(name: str) -> Callable[[RegisterType], Lines]:
    """A function of f32 by way of the one of f64: rounded once, and so within an ulp."""

    def define(t: RegisterType) -> Lines:
        wide = t.of("double")
        yield f"define internal {t} @ts.{name}.{t.suffix}({t} %x) alwaysinline #0 {{"
        yield "entry:"
        yield f"  %a = fpext {t} %x to {wide}"
        yield f"  %b = {format_function_call(f'ts.{name}', wide, ['%a'])}"
        yield f"  %r = fptrunc {wide} %b to {t}"
        yield f"  ret {t} %r"
        yield "}"

    return define


SPECIAL_DEFINITIONS: dict[tuple[str, str], Callable[[RegisterType], Lines]] = {
    ("pow", "float"): _define_pow,
    **{(name, "float"): _define_through_f64(name) for name in ("expm1", "log1p", "atan")},
    ("sin", "float"): define_sine,
    ("cos", "float"): define_cosine,
    ("sin_large", "float"): define_for_large_arguments("sin"),
    ("cos_large", "float"): define_for_large_arguments("cos"),
}
