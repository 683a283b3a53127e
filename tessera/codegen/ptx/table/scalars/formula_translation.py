"""Formula translation: scalar functions in the notation of `codegen/notation.py`, translated to PTX where used.

Words of this target: `ex2` (the hardware's power of two of an f32), `ex2z` and `rcpz` (power and reciprocal with
subnormals flushed to 0), `fneg`, and `least` and `most` (minimum and maximum that propagate NaN).
"""

from __future__ import annotations

from collections.abc import Callable, Container

from tessera.codegen.ptx.text.builder import PtxBuilder
from tessera.codegen.ptx.text.register_types import literal
from tessera.codegen.scalar_functions import parse_formula_line
from tessera.core.errors import UnsupportedOpError

ARITHMETIC = {
    "fadd": "add.rn", "fsub": "sub.rn", "fmul": "mul.rn", "fdiv": "div.rn", "fma": "fma.rn", "fabs": "abs",
    "fneg": "neg",
    "sqrt": "sqrt.rn", "least": "min.NaN", "most": "max.NaN",
}  # fmt: skip
INTEGER = {
    "add": "add.s", "sub": "sub.s", "and": "and.b", "or": "or.b", "xor": "xor.b", "shl": "shl.b", "ashr": "shr.s",
    "lshr": "shr.u",
}  # fmt: skip
COMPARE = {"lt": "lt", "gt": "gt", "le": "le", "ge": "ge", "eq": "eq", "ne": "neu", "uno": "nan"}
COMPARE_WHOLE = {"ieq": "eq", "ilt": "lt", "igt": "gt"}
LOGIC = {"band": "and.pred", "bor": "or.pred", "bxor": "xor.pred"}
SELECT = {"select": "f", "iselect": "b"}
ROUND = {"floor": "rmi", "trunc": "rzi"}
APPROXIMATE = {"ex2": "ex2.approx.f32", "ex2z": "ex2.approx.ftz.f32", "rcpz": "rcp.approx.ftz.f32"}
BIT_MOVES = {"bits": ("mov.b", "b"), "real": ("mov.b", "f"), "toreal": ("cvt.rn.f{n}.s", "f")}

# (name, type word) to a formula, or to a function of the text and the operands.
FormulaDefinition = str | Callable[..., str]
FORMULAS: dict[tuple[str, str], FormulaDefinition] = {}


def apply_formula(text: PtxBuilder, name: str, word: str, *operands: str) -> str:
    """The register of a function's result.

    Raises:
        UnsupportedOpError: there is no formula for it in this type.
    """
    found = FORMULAS.get((name, word))
    if found is None:
        raise UnsupportedOpError(f"the target ptx has no {name} of {word}", suggestion="cast to ts.f32 before")
    if callable(found):
        return found(text, *operands)
    formula = FormulaTranslator(text, word, dict(zip("xy", operands, strict=False)))
    for line in found.split("\n"):
        if line:
            formula.line(line)
    return formula.names["r"]


class FormulaTranslator:
    """One use of a function: the registers that its names stand for."""

    def __init__(self, text: PtxBuilder, word: str, names: dict[str, str]) -> None:
        self.text, self.word, self.names = text, word, names
        self.bits = int(word[1:])

    def line(self, line: str) -> None:
        """A line of the notation."""
        name, word, operands = parse_formula_line(line)
        rule = next(rule for words, rule in WORD_RULES if word in words or not words)
        self.names[name] = rule(self, word, operands)

    def real(self, x: str) -> str:
        """An operand that is a float."""
        return self.names[x] if x in self.names else literal(self.word, float(x))

    def whole(self, x: str) -> str:
        """An operand that is an integer."""
        return self.names[x] if x in self.names else str(int(x, 0))

    def let(self, instruction: str, kind: str, *operands: object) -> str:
        """An instruction whose result is a float (f), bits (b) or a condition."""
        return self.text.let(instruction, kind if kind == "pred" else f"{kind}{self.bits}", *operands)


def _arithmetic(f: FormulaTranslator, word: str, xs: list[str]) -> str:
    return f.let(f"{ARITHMETIC[word]}.{f.word}", "f", *map(f.real, xs))


def _integer(f: FormulaTranslator, word: str, xs: list[str]) -> str:
    return f.let(f"{INTEGER[word]}{f.bits}", "b", *map(f.whole, xs))


def _compare(f: FormulaTranslator, word: str, xs: list[str]) -> str:
    return f.let(f"setp.{COMPARE[word]}.{f.word}", "pred", *map(f.real, xs))


def _compare_whole(f: FormulaTranslator, word: str, xs: list[str]) -> str:
    return f.let(f"setp.{COMPARE_WHOLE[word]}.s{f.bits}", "pred", *map(f.whole, xs))


def _logic(f: FormulaTranslator, word: str, xs: list[str]) -> str:
    return f.let(LOGIC[word], "pred", *(f.names[x] for x in xs))


def _select(f: FormulaTranslator, word: str, xs: list[str]) -> str:
    kind, get = (SELECT[word], f.real if word == "select" else f.whole)
    return f.let(f"selp.{kind}{f.bits}", kind, get(xs[1]), get(xs[2]), f.names[xs[0]])


def _round(f: FormulaTranslator, word: str, xs: list[str]) -> str:
    return f.let(f"cvt.{ROUND[word]}.{f.word}.{f.word}", "f", f.real(xs[0]))


def _move(f: FormulaTranslator, word: str, xs: list[str]) -> str:
    instruction, kind = BIT_MOVES[word]
    get = f.real if word == "bits" else f.whole
    return f.let(f"{instruction.format(n=f.bits)}{f.bits}", kind, get(xs[0]))


def _sign(f: FormulaTranslator, word: str, xs: list[str]) -> str:
    """The magnitude of the first with the sign of the second."""
    return f.let(f"copysign.{f.word}", "f", f.real(xs[1]), f.real(xs[0]))


def _poly(f: FormulaTranslator, word: str, xs: list[str]) -> str:
    x, first, *rest = xs
    total = f.real(first)
    for c in rest:
        total = f.let(f"fma.rn.{f.word}", "f", total, f.real(x), f.real(c))
    return total


def _approximate(f: FormulaTranslator, word: str, xs: list[str]) -> str:
    return f.let(APPROXIMATE[word], "f", f.real(xs[0]))


def _rest(f: FormulaTranslator, word: str, xs: list[str]) -> str:
    return apply_formula(f.text, "fmod", f.word, *map(f.real, xs))


def _call(f: FormulaTranslator, word: str, xs: list[str]) -> str:
    return apply_formula(f.text, word, f.word, *map(f.real, xs))


WORD_RULES: tuple[tuple[Container[str], Callable[[FormulaTranslator, str, list[str]], str]], ...] = (
    (ARITHMETIC, _arithmetic),
    (INTEGER, _integer),
    (COMPARE, _compare),
    (COMPARE_WHOLE, _compare_whole),
    (LOGIC, _logic),
    (SELECT, _select),
    (ROUND, _round),
    (BIT_MOVES, _move),
    (("copysign",), _sign),
    (("poly",), _poly),
    (APPROXIMATE, _approximate),
    (("frem",), _rest),
    ((), _call),
)
