"""Function source: the parsed syntax tree with source locations, and early returns normalised to branches."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from tessera.core.errors import Location, UnsupportedSyntaxError
from tessera.frontend.kernel.python_ast.liveness import Liveness

# Early returns made branches: `if done: return` puts what follows in the other branch.


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

    def location(self, node: ast.AST) -> Location:
        """The place of a piece of syntax: lines and columns count from 1."""
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


@functools.cache
def _parse_source(code: CodeType, name: str) -> FunctionSource:
    place = Location(code.co_filename, code.co_firstlineno)
    if code.co_name == "<lambda>":
        return make_inner_source(_find_lambda(code, place), code.co_filename, 0)
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        raise UnsupportedSyntaxError(
            f"the source of {name} cannot be read", location=place,
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
