"""The source of a function: its syntax tree, and where in the file each piece of it stands."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from tessera.errors import Location, UnsupportedSyntaxError
from tessera.kernel.liveness import Liveness
from tessera.kernel.returns import normalized


@dataclass(frozen=True, eq=False)
class Source:
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


def read(function: Callable[..., Any]) -> Source:
    """The source of a Python function.

    Raises:
        UnsupportedSyntaxError: there is no source to read (a function typed into a prompt).
    """
    return _read(function.__code__, function.__name__)


@functools.cache
def _read(code: CodeType, name: str) -> Source:
    place = Location(code.co_filename, code.co_firstlineno)
    if code.co_name == "<lambda>":
        return source_of(_lambda(code, place), code.co_filename, 0)
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
    return source_of(found, code.co_filename, shift)


def _lambda(code: CodeType, place: Location) -> ast.FunctionDef:
    """A lambda as a definition, found in its file by where it stands."""
    lines = linecache.getlines(code.co_filename)
    tree = ast.parse("".join(lines))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno]
    if len(found) > 1 and hasattr(code, "co_positions"):  # Python 3.11 on
        places = {*code.co_positions()}
        found = [n for n in found if _span(n.body) in places]
    if len(found) != 1:
        raise UnsupportedSyntaxError(
            "which lambda of this line is meant cannot be told" if found else "the source of a lambda cannot be read",
            location=place, suggestion="use def",
        )  # fmt: skip
    body = ast.copy_location(ast.Return(found[0].body), found[0].body)
    return ast.copy_location(ast.FunctionDef("<lambda>", found[0].args, [body], []), found[0])


def _span(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def source_of(node: ast.FunctionDef, file: str, shift: int) -> Source:
    """The source of a definition already parsed."""
    body, tails = normalized(node.body)
    return Source(node.name, file, tuple(body), tails, Liveness(body), shift, node.lineno + shift)
