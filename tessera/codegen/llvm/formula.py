"""The notation of formulas (`codegen/notation.py`) as LLVM, for any vector width: a word is a call of ts.<word>."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from tessera.codegen.llvm.types import Vec
from tessera.codegen.notation import parse

Lines = Iterator[str]

FLOAT = {"fadd", "fsub", "fmul", "fdiv", "frem"}
INTRINSIC = {"fma", "fabs", "floor", "trunc", "sqrt", "copysign"}
INTEGER = {"add", "sub", "and", "or", "xor", "shl", "ashr", "lshr"}
CONDITION = {"band": "and", "bor": "or", "bxor": "xor"}
COMPARE = {"lt": "olt", "gt": "ogt", "le": "ole", "ge": "oge", "eq": "oeq", "ne": "une", "uno": "uno"}
INTEGER_COMPARE = {"ieq": "eq", "ilt": "slt", "igt": "sgt"}


class Formula:
    """The translation of one function's lines: it knows the type of each name."""

    def __init__(self, t: Vec) -> None:
        self.t, self.i, self.b = t, t.integer, t.truth

    def line(self, text: str) -> Lines:
        """A line of the notation as lines of LLVM."""
        name, word, operands = parse(text)
        d = f"%{name}"
        for words, rule in RULES:
            if word in words:
                yield from rule(self, d, word, operands)
                return
        yield f"{d} = {call(f'ts.{word}', self.t, [self.float(x) for x in operands])}"

    def float(self, x: str) -> str:
        """An operand that is a float."""
        return operand(self.t, x)

    def integer(self, x: str) -> str:
        """An operand that is an integer."""
        return operand(self.i, x)


def operand(t: Vec, x: str) -> str:
    """A name or a number as an operand of a type."""
    if x[0].isalpha() and x not in ("inf", "nan"):
        return f"%{x}"
    return t.const(float(x) if t.is_float else int(x, 0))


def call(name: str, t: Vec, operands: list[str]) -> str:
    """A call whose operands and result have one type."""
    return f"call {t} @{name}.{t.suffix}({', '.join(f'{t} {x}' for x in operands)})"


def _float(f: Formula, d: str, word: str, xs: list[str]) -> Lines:
    a, b = (f.float(x) for x in xs)
    yield f"{d} = {word} {f.t} {a}, {b}"


def _intrinsic(f: Formula, d: str, word: str, xs: list[str]) -> Lines:
    yield f"{d} = {call(f'llvm.{word}', f.t, [f.float(x) for x in xs])}"


def _integer(f: Formula, d: str, word: str, xs: list[str]) -> Lines:
    a, b = (f.integer(x) for x in xs)
    yield f"{d} = {word} {f.i} {a}, {b}"


def _condition(f: Formula, d: str, word: str, xs: list[str]) -> Lines:
    yield f"{d} = {CONDITION[word]} {f.b} %{xs[0]}, %{xs[1]}"


def _compare(f: Formula, d: str, word: str, xs: list[str]) -> Lines:
    a, b = (f.float(x) for x in xs)
    yield f"{d} = fcmp {COMPARE[word]} {f.t} {a}, {b}"


def _integer_compare(f: Formula, d: str, word: str, xs: list[str]) -> Lines:
    a, b = (f.integer(x) for x in xs)
    yield f"{d} = icmp {INTEGER_COMPARE[word]} {f.i} {a}, {b}"


def _select(f: Formula, d: str, word: str, xs: list[str]) -> Lines:
    t, get = (f.t, f.float) if word == "select" else (f.i, f.integer)
    yield f"{d} = select {f.b} %{xs[0]}, {t} {get(xs[1])}, {t} {get(xs[2])}"


def _convert(f: Formula, d: str, word: str, xs: list[str]) -> Lines:
    if word == "bits":
        yield f"{d} = bitcast {f.t} {f.float(xs[0])} to {f.i}"
    else:
        yield f"{d} = {'bitcast' if word == 'real' else 'sitofp'} {f.i} {f.integer(xs[0])} to {f.t}"


def _width(f: Formula, d: str, word: str, xs: list[str]) -> Lines:
    one, other = f.t.of("float"), f.t.of("double")
    if word == "wide":
        yield f"{d} = fpext {one} %{xs[0]} to {other}"
    else:
        yield f"{d} = fptrunc {other} %{xs[0]} to {one}"


def _poly(f: Formula, d: str, word: str, xs: list[str]) -> Lines:
    x, first, *rest = xs
    total = f.float(first)
    for n, c in enumerate(rest):
        name = d if n == len(rest) - 1 else f"{d}.{n}"
        yield f"{name} = {call('llvm.fma', f.t, [total, f.float(x), f.float(c)])}"
        total = name


Rule = Callable[[Formula, str, str, list[str]], Lines]
RULES: tuple[tuple[Container[str], Rule], ...] = (
    (FLOAT, _float), (INTRINSIC, _intrinsic), (INTEGER, _integer), (CONDITION, _condition), (COMPARE, _compare),
    (INTEGER_COMPARE, _integer_compare), ({"select", "iselect"}, _select), ({"bits", "real", "toreal"}, _convert),
    ({"wide", "narrow"}, _width), ({"poly"}, _poly),
)  # fmt: skip


def function(name: str, t: Vec, text: str, operands: int = 1) -> Lines:
    """The definition of a function written in the notation."""
    params = ", ".join(f"{t} %{x}" for x in "xy"[:operands])
    formula = Formula(t)
    yield f"define internal {t} @ts.{name}.{t.suffix}({params}) alwaysinline #0 {{"
    yield "entry:"
    yield from (f"  {each}" for line in text.split("\n") if line for each in formula.line(line))
    yield f"  ret {t} %r"
    yield "}"
