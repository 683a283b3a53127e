"""Function source: the syntax tree with locations, early returns as branches, and liveness of names."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from tessera.core.errors import Location, UnsupportedSyntaxError, is_main_text

# Liveness analysis of names: what a loop must carry and a branch must yield (backward data flow).


NameSet = frozenset[str]
# Functions that, called as statements, update the variable given first (see marks.updates_first).
UPDATING_FUNCTIONS = frozenset({"mma", "mask_causal"})
_NESTED_SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.GeneratorExp)


def find_reads(*nodes: ast.AST | None) -> NameSet:
    """The names read anywhere inside."""
    walked = (n for node in nodes if node is not None for n in ast.walk(node))
    return frozenset(n.id for n in walked if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


def find_writes(nodes: Iterable[ast.AST]) -> NameSet:
    """The names assigned inside, inner functions and comprehensions left out."""
    return frozenset().union(*map(_find_node_writes, nodes))


# A statement of a loop, or of a function inlined many times, is asked about each time that it is traced.
_WRITES: WeakKeyDictionary[ast.AST, NameSet] = WeakKeyDictionary()


def _find_node_writes(node: ast.AST) -> NameSet:
    known = _WRITES.get(node)
    if known is None:
        found: set[str] = set()
        _collect_writes(node, found)
        known = _WRITES[node] = frozenset(found)
    return known


def _collect_writes(node: ast.AST, found: set[str]) -> None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        found.add(node.id)
    if isinstance(node, ast.FunctionDef):
        found.add(node.name)
    if isinstance(node, ast.Expr):
        found |= _find_updated(node.value)
    if not isinstance(node, _NESTED_SCOPES):
        for child in ast.iter_child_nodes(node):
            _collect_writes(child, found)


def _find_updated(node: ast.expr) -> set[str]:
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Name):
        return set()
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return {node.args[0].id} if name in UPDATING_FUNCTIONS else set()


class Liveness:
    """For each statement the names live after it; for each loop also those live where its body begins."""

    def __init__(self, body: Sequence[ast.stmt]) -> None:
        inner = [n for s in body for n in ast.walk(s) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
        self.always = find_reads(*inner)  # an inner function may be called anywhere
        self.after: dict[ast.stmt, NameSet] = {}
        self.head: dict[ast.stmt, NameSet] = {}
        self._exits: list[NameSet] = []
        self._block(body, frozenset())

    def _block(self, statements: Sequence[ast.stmt], after: NameSet) -> NameSet:
        for each in reversed(statements):
            self.after[each] = after | self.always
            after = _LIVENESS_RULES.get(type(each), Liveness._simple)(self, each, after)
        return after

    def _simple(self, node: ast.stmt, after: NameSet) -> NameSet:
        return after - find_writes([node]) | find_reads(node) | _find_augmented(node)

    def _if(self, node: ast.If, after: NameSet) -> NameSet:
        return find_reads(node.test) | self._block(node.body, after) | self._block(node.orelse, after)

    def _with(self, node: ast.With, after: NameSet) -> NameSet:
        named = find_writes(i.optional_vars for i in node.items if i.optional_vars is not None)
        return find_reads(*(i.context_expr for i in node.items)) | (self._block(node.body, after) - named)

    def _for(self, node: ast.For, after: NameSet) -> NameSet:
        return find_reads(node.iter) | self._loop(node, after, find_reads(), find_writes([node.target]))

    def _while(self, node: ast.While, after: NameSet) -> NameSet:
        return self._loop(node, after, find_reads(node.test), frozenset())

    def _loop(self, node: ast.For | ast.While, after: NameSet, test: NameSet, bound: NameSet) -> NameSet:
        head: NameSet = after | test
        while True:
            self._exits.append(head)
            found = head | (self._block(node.body, head) - bound)
            self._exits.pop()
            if found == head:
                self.head[node] = head | self.always
                return head
            head = found

    def _leave(self, node: ast.stmt, after: NameSet) -> NameSet:
        return self._exits[-1] if self._exits else after

    def _return(self, node: ast.Return, after: NameSet) -> NameSet:
        return find_reads(node.value)


def _find_augmented(node: ast.stmt) -> NameSet:
    target = node.target if isinstance(node, ast.AugAssign) else None
    return frozenset([target.id]) if isinstance(target, ast.Name) else frozenset()


_LIVENESS_RULES: dict[type, Callable[..., NameSet]] = {
    ast.If: Liveness._if,
    ast.For: Liveness._for,
    ast.While: Liveness._while,
    ast.Break: Liveness._leave,
    ast.Continue: Liveness._leave,
    ast.Return: Liveness._return,
    ast.With: Liveness._with,
}


def normalise_returns(statements: Sequence[ast.stmt]) -> tuple[list[ast.stmt], frozenset[ast.stmt]]:
    """Statements of a function body in which only the last one of a list returns, and the last branches."""
    tails: set[ast.stmt] = set()
    return _normalise_tail(list(statements), tails), frozenset(tails)


def _normalise_tail(statements: list[ast.stmt], tails: set[ast.stmt]) -> list[ast.stmt]:
    for place, each in enumerate(statements):
        if isinstance(each, ast.Return):
            return statements[: place + 1]
        rest = statements[place + 1 :]
        if isinstance(each, ast.If) and (not rest or _always_returns(each.body) or _always_returns(each.orelse)):
            body = each.body if _always_returns(each.body) else [*each.body, *rest]
            other = each.orelse if _always_returns(each.orelse) else [*each.orelse, *rest]
            branch = ast.If(each.test, _normalise_tail(body, tails), _normalise_tail(other, tails))
            ast.copy_location(branch, each)
            tails.add(branch)
            return [*statements[:place], branch]
    return statements


def _always_returns(statements: Sequence[ast.stmt]) -> bool:
    """Whether every way through the statements returns."""
    if not statements:
        return False
    last = statements[-1]
    both = isinstance(last, ast.If) and _always_returns(last.body) and _always_returns(last.orelse)
    return both or any(isinstance(s, ast.Return) for s in statements)


@dataclass(frozen=True, eq=False)
class FunctionSource:
    """A function's statements (early returns made branches), its file, and what is live where."""

    name: str
    file: str
    body: tuple[ast.stmt, ...]
    tails: frozenset[ast.stmt]  # the branches with nothing after them: they alone may return
    live: Liveness
    shift: int
    first: int
    _locations: WeakKeyDictionary[ast.AST, Location] = field(default_factory=WeakKeyDictionary, repr=False)

    def location(self, node: ast.AST) -> Location:
        """The place of a piece of syntax: lines and columns count from 1."""
        known = self._locations.get(node)
        if known is None:
            known = self._locations[node] = self._locate(node)
        return known

    def _locate(self, node: ast.AST) -> Location:
        line = getattr(node, "lineno", 0) + self.shift
        column = self._column(line, getattr(node, "col_offset", 0))
        same = getattr(node, "end_lineno", None) == getattr(node, "lineno", 0)
        return Location(self.file, line, column, self._column(line, node.end_col_offset) if same else 0)  # type: ignore[attr-defined]

    def _column(self, line: int, offset: int) -> int:
        text = linecache.getline(self.file, line)
        return (offset if text.isascii() else len(text.encode()[:offset].decode(errors="ignore"))) + 1

    @property
    def place(self) -> Location:
        """The line of the definition."""
        return Location(self.file, self.first)


def read_source(function: Callable[..., Any]) -> FunctionSource:
    """The source of a Python function.

    Raises:
        UnsupportedSyntaxError: there is no source to read (a function typed into a prompt).
    """
    return _parse_source(function.__code__, function.__name__)


# Why there is no source for code of these pseudo files.
SOURCE_PROBLEMS = {
    "<stdin>": ": the program came through a pipe (python - <<EOF) or from Python's prompt, which keep no text",
    "<string>": ": it was made by exec or eval",
}


@functools.cache
def _parse_source(code: CodeType, name: str) -> FunctionSource:
    place = Location(code.co_filename, code.co_firstlineno)
    if code.co_name == "<lambda>":
        return make_inner_source(_find_lambda(code, place), code.co_filename, 0)
    try:
        if code.co_filename in SOURCE_PROBLEMS and not is_main_text(code):
            raise OSError
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        raise UnsupportedSyntaxError(
            f"the source of {name} cannot be read{SOURCE_PROBLEMS.get(code.co_filename, '')}", location=place,
            expected="a function in a file, in a notebook's cell, or in the text of python -c",
            suggestion="put the function in a file and import it",
        ) from None  # fmt: skip
    text = "".join(lines)
    nested = text[:1].isspace()
    # Wrapped rather than dedented: columns and multi-line strings stay as they are in the file.
    tree = ast.parse("if 1:\n" + text if nested else text)
    shift = (first or 1) - 1 - nested
    found = next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)), None)
    if found is None:
        raise UnsupportedSyntaxError(f"{name} is not a plain function", location=place, suggestion="use def")
    return make_inner_source(found, code.co_filename, shift)


def _find_lambda(code: CodeType, place: Location) -> ast.FunctionDef:
    """A lambda as a definition, found in its file by where it stands."""
    lines = linecache.getlines(code.co_filename)
    tree = ast.parse("".join(lines))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno]
    if len(found) > 1 and hasattr(code, "co_positions"):  # Python 3.11 on
        places = {*code.co_positions()}
        found = [n for n in found if _source_span(n.body) in places]
    if len(found) != 1:
        raise UnsupportedSyntaxError(
            "which lambda of this line is meant cannot be told" if found else "the source of a lambda cannot be read",
            location=place, suggestion="use def",
        )  # fmt: skip
    body = ast.copy_location(ast.Return(found[0].body), found[0].body)
    return ast.copy_location(ast.FunctionDef("<lambda>", found[0].args, [body], []), found[0])


def _source_span(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def make_inner_source(node: ast.FunctionDef, file: str, shift: int) -> FunctionSource:
    """The source of a definition already parsed."""
    body, tails = normalise_returns(node.body)
    return FunctionSource(node.name, file, tuple(body), tails, Liveness(body), shift, node.lineno + shift)
