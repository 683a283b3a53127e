"""The state of one analysis: the unit, the module, the scope, and the code written so far."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail
from tessera.interp.target.csl.sema.operand import Operand

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tessera.interp.target.csl.sema.functions import Instance
    from tessera.interp.target.csl.sema.module import Module
    from tessera.interp.target.csl.sema.unit import Unit

Rule = Callable[["Frame", Any], Operand]
# One meaning for each class of syntax; the modules of this package fill it.
MEANING: dict[type, Rule] = {}


def meaning(*classes: type) -> Callable[[Rule], Rule]:
    """Register the meaning of these classes of syntax."""

    def add(rule: Rule) -> Rule:
        MEANING.update(dict.fromkeys(classes, rule))
        return rule

    return add


class Line(NamedTuple):
    """One line of generated Python and the CSL it stands for."""

    depth: int
    text: str
    loc: Location


class Loop:
    """A loop or labelled block under analysis that jumps may name."""

    def __init__(self, label: str, kind: str) -> None:
        self.label, self.kind = label, kind
        self.step: Callable[[], None] | None = None
        self.result = ""
        self.types: list[Operand] = []
        self.flag = ""


class ComptimeJump(Exception):
    """A break, continue or return met while evaluating at compile time."""

    def __init__(self, kind: str, label: str, value: Operand | None) -> None:
        super().__init__(kind)
        self.kind, self.label, self.value = kind, label, value


class Frame:
    """One function body, block or initializer under analysis."""

    def __init__(self, unit: Unit, module: Module, comptime: bool, function: Instance | None = None) -> None:
        self.unit, self.module, self.comptime, self.function = unit, module, comptime, function
        self.scopes: list[dict[str, Operand]] = [{}]
        self.lines: list[Line] = []
        self.depth = 1
        self.cost = 0
        self.loops: list[Loop] = []
        self.cells: frozenset[str] = frozenset()
        self.section = ""  # "layout" or "comptime" in a top-level block
        self.loc = module.loc

    def value(self, node: s.Syntax) -> Operand:
        """The meaning of an expression or statement."""
        found = MEANING[type(node)](self, node)
        if self.comptime and not found.known and found.fields is None:
            fail(node.loc, "expression is not known at compile time")
        return found

    def operand(self, node: s.Syntax) -> Operand:
        """The meaning of an expression that may be a run-time place even at compile time."""
        return MEANING[type(node)](self, node)

    def run(self, node: s.Syntax) -> None:
        """Execute or write a statement."""
        self.loc = node.loc
        found = self.operand(node)
        if not found.known and found.code and not self.comptime and not found.code.isidentifier():
            self.emit(found.code, node.loc)

    def emit(self, text: str, loc: Location) -> None:
        """Write one line of Python."""
        self.lines.append(Line(self.depth, text, loc))

    def flush(self, loc: Location) -> None:
        """Account the cycles of the scalar code written since the last time."""
        if self.cost and not self.comptime:
            self.emit(f"pe.clock += {self.cost}", loc)
        self.cost = 0

    def fresh(self, name: str) -> str:
        """A Python name that nothing else has."""
        return self.unit.fresh(name)

    @contextmanager
    def scope(self) -> Iterator[dict[str, Operand]]:
        """A nested scope of names."""
        names: dict[str, Operand] = {}
        self.scopes.append(names)
        try:
            yield names
        finally:
            self.scopes.pop()

    @contextmanager
    def indented(self) -> Iterator[None]:
        """Deeper by one level."""
        self.depth += 1
        start = len(self.lines)
        yield
        if len(self.lines) == start:
            self.emit("pass", self.loc)
        self.depth -= 1

    @contextmanager
    def captured(self) -> Iterator[list[Line]]:
        """Lines written inside go to the list that is given, not to the function."""
        outer, self.lines = self.lines, []
        try:
            yield self.lines
        finally:
            self.lines = outer

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate at compile time inside."""
        before, self.comptime = self.comptime, True
        try:
            yield
        finally:
            self.comptime = before

    def declare(self, name: str, operand: Operand, loc: Location) -> None:
        """Give a name a meaning in the innermost scope."""
        if name in t.NAMED:
            fail(loc, f"declaration of '{name}' shadows builtin type")
        if name in self.scopes[-1]:
            fail(loc, f"redeclaration of '{name}'")
        self.scopes[-1][name] = operand

    def find(self, name: str) -> Operand | None:
        """The local meaning of a name."""
        for names in reversed(self.scopes):
            if name in names:
                return names[name]
        return None
