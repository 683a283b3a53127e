"""Analysis context: expression values, lvalues, scopes, and the generated Python code.

`SEMANTIC_RULES` holds one rule for each class of syntax; the modules of this package register the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tessera.core.errors import UNKNOWN, Location
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.values import ComptimeValue, Pointer
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import fail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tessera.interp.target.csl.sema.compilation_unit import CompilationUnit, CslModule
    from tessera.interp.target.csl.sema.functions import FunctionInstance


# Expression values: a type with a comptime-known value, or with the Python code that computes it at run time.


MISSING: Any = object()


class LValue:
    """The memory location of a value: `array[index]` as code, or a comptime pointer.

    `load` and `store` are code for cells with a faster form (a Python local or global); `take` returns the comptime
    pointer, and allocates the memory of a constant that has none yet.
    """

    __slots__ = ("mutable", "array", "index", "store", "take")

    def __init__(
        self,
        mutable: bool,
        array: str = "",
        index: str = "0",
        store: str = "",
        take: Callable[[], Pointer] | None = None,
    ) -> None:
        self.mutable, self.array, self.index, self.store, self.take = mutable, array, index, store, take


class ExprValue:
    """The value of one expression. Exactly one of `const`, `code` and `fields` is set.

    `span`: the least and the greatest value of an integer, where they are narrower than its type.
    """

    __slots__ = ("type", "const", "code", "place", "fields", "loc", "span")

    def __init__(
        self,
        type_: t.CslType,
        const: Any = MISSING,
        code: str = "",
        place: LValue | None = None,
        fields: dict[str, ExprValue] | None = None,
        loc: Location = UNKNOWN,
    ) -> None:
        self.type, self.const, self.code = type_, const, code
        self.place, self.fields, self.loc = place, fields, loc

    @property
    def known(self) -> bool:
        """Whether the value is comptime-known."""
        return self.const is not MISSING

    @property
    def value(self) -> ComptimeValue:
        """The comptime value."""
        assert self.known
        return ComptimeValue(self.type, self.const)

    def within(self, span: tuple[int, int]) -> ExprValue:
        """The same value, which is known to lie in a span."""
        self.span = span
        return self

    def at(self, loc: Location) -> ExprValue:
        """The same value with another source location."""
        self.loc = loc
        return self


VOID = ExprValue(t.VOID, None)


def make_known(type_: t.CslType, data: Any, loc: Location = UNKNOWN) -> ExprValue:
    """An operand with a comptime-known value."""
    return ExprValue(type_, data, loc=loc)


def make_runtime(type_: t.CslType, code: str, loc: Location = UNKNOWN, place: LValue | None = None) -> ExprValue:
    """An operand that `code` computes at run time."""
    return ExprValue(type_, code=code, place=place, loc=loc)


def make_from_value(value: ComptimeValue, loc: Location = UNKNOWN) -> ExprValue:
    """The operand of a comptime value; an anonymous struct becomes its fields."""
    return ExprValue(value.type, value.data, loc=loc)


def make_anonymous_struct(fields: dict[str, ExprValue], loc: Location) -> ExprValue:
    """An anonymous struct; it is known if every field is known."""
    if all(o.known for o in fields.values()):
        return ExprValue(t.ANON, {n: o.value for n, o in fields.items()}, loc=loc)
    return ExprValue(t.ANON, fields=fields, loc=loc)


def list_members(operand: ExprValue) -> dict[str, ExprValue]:
    """The fields of an anonymous struct."""
    if operand.fields is not None:
        return operand.fields
    return {n: make_from_value(v, operand.loc) for n, v in operand.const.items()}


# The state of one analysis: the unit, the module, the scope, and the generated code.


SemanticRule = Callable[["AnalysisContext", Any], ExprValue]
# One rule for each class of syntax; the modules of this package register them.
SEMANTIC_RULES: dict[type, SemanticRule] = {}


def register_rule(*classes: type) -> Callable[[SemanticRule], SemanticRule]:
    """Register the rule of some classes of syntax."""

    def add(rule: SemanticRule) -> SemanticRule:
        SEMANTIC_RULES.update(dict.fromkeys(classes, rule))
        return rule

    return add


class GeneratedLine(NamedTuple):
    """One line of generated Python, with its CSL location."""

    depth: int
    text: str
    loc: Location


class LoopScope:
    """A loop or labelled block that a jump can name."""

    def __init__(self, label: str, kind: str) -> None:
        self.label, self.kind = label, kind
        self.step: Callable[[], None] | None = None
        self.result = ""
        self.types: list[ExprValue] = []
        self.flag = ""


class ComptimeJump(Exception):
    """A break, continue or return during comptime evaluation."""

    def __init__(self, kind: str, label: str, value: ExprValue | None) -> None:
        super().__init__(kind)
        self.kind, self.label, self.value = kind, label, value


class NestedScope:
    """A context in which names are declared in a scope of their own."""

    __slots__ = ("scopes",)

    def __init__(self, f: AnalysisContext) -> None:
        self.scopes = f.scopes

    def __enter__(self) -> dict[str, ExprValue]:
        names: dict[str, ExprValue] = {}
        self.scopes.append(names)
        return names

    def __exit__(self, *error: object) -> None:
        self.scopes.pop()


class AnalysisContext:
    """The analysis of one function body, block or initializer."""

    def __init__(
        self, unit: CompilationUnit, module: CslModule, comptime: bool, function: FunctionInstance | None = None
    ) -> None:
        self.unit, self.module, self.comptime, self.function = unit, module, comptime, function
        self.scopes: list[dict[str, ExprValue]] = [{}]
        self.lines: list[GeneratedLine] = []
        self.depth = 1
        self.cost = 0
        self.held: set[str] = set()  # elements whose values are in registers
        self.loops: list[LoopScope] = []
        self.cells: frozenset[str] = frozenset()
        self.section = ""  # "layout" or "comptime" in a top-level block
        self.loc = module.loc

    def evaluate(self, node: s.SyntaxNode) -> ExprValue:
        """Evaluate an expression or statement."""
        operand = SEMANTIC_RULES[type(node)](self, node)
        if self.comptime and not operand.known and operand.fields is None:
            fail(node.loc, "expression is not known at compile time")
        return operand

    def evaluate_operand(self, node: s.SyntaxNode) -> ExprValue:
        """Evaluate an expression that may be a run-time lvalue even at comptime."""
        return SEMANTIC_RULES[type(node)](self, node)

    def run(self, node: s.SyntaxNode) -> None:
        """Execute a statement at comptime, or generate its code."""
        self.loc = node.loc
        operand = self.evaluate_operand(node)
        if not operand.known and operand.code and not self.comptime and not operand.code.isidentifier():
            self.emit(operand.code, node.loc)

    def emit(self, text: str, loc: Location) -> None:
        """Generate one line of Python."""
        self.lines.append(GeneratedLine(self.depth, text, loc))

    def flush(self, loc: Location) -> None:
        """Generate the cycle count of the scalar code since the last flush."""
        if self.cost and not self.comptime:
            self.emit(f"pe.clock += {self.cost}", loc)
        self.cost = 0

    def hold(self, element: ExprValue) -> bool:
        """Hold an element at a constant index in a register; whether it has to be loaded first."""
        new = element.known or element.code not in self.held
        self.held.add(element.code)
        return new

    def make_name(self, name: str) -> str:
        """A unique Python name."""
        return self.unit.make_name(name)

    def scope(self) -> NestedScope:
        """A nested scope of names."""
        return NestedScope(self)

    @contextmanager
    def indent_lines(self) -> Iterator[None]:
        """Indent the lines generated in the context."""
        self.depth += 1
        start = len(self.lines)
        yield
        if len(self.lines) == start:
            self.emit("pass", self.loc)
        self.depth -= 1

    @contextmanager
    def capture_lines(self) -> Iterator[list[GeneratedLine]]:
        """Collect the lines generated in the context in the given list instead of the function."""
        outer, self.lines = self.lines, []
        try:
            yield self.lines
        finally:
            self.lines = outer

    def evaluate_at_comptime(self, node: s.SyntaxNode) -> ExprValue:
        """Evaluate an expression that must be comptime-known."""
        before, self.comptime = self.comptime, True
        try:
            return self.evaluate(node)
        finally:
            self.comptime = before

    @contextmanager
    def at_comptime(self) -> Iterator[None]:
        """Evaluate at comptime in the context."""
        before, self.comptime = self.comptime, True
        try:
            yield
        finally:
            self.comptime = before

    def declare(self, name: str, operand: ExprValue, loc: Location) -> None:
        """Bind a name in the innermost scope."""
        if name in t.NAMED:
            fail(loc, f"declaration of '{name}' shadows builtin type")
        if name in self.scopes[-1]:
            fail(loc, f"redeclaration of '{name}'")
        self.scopes[-1][name] = operand

    def find(self, name: str) -> ExprValue | None:
        """The local operand of a name."""
        for names in reversed(self.scopes):
            if name in names:
                return names[name]
        return None
