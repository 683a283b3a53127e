"""Sizes read from what users write: names, expressions, type variables; and sizes as numbers."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any, TypeVar

from tessera.errors import ShapeError, here
from tessera.shapes.dim import TYPES_ALONE, Dim, Size, known

_LARGE = re.compile(r"(\d+)([KMGT])")

_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def as_size(value: int | str | Dim | TypeVar) -> Size:
    """A size from an int, a name, an expression such as "2*D+1" or a type variable (`def f[B](...)`).

    "4K", "1M", "2G" and "1T" are powers of 1024.

    >>> as_size("2*D") // 2, as_size("1M")
    (D, 1048576)
    """
    if isinstance(value, str):
        return _parse(value)
    if isinstance(value, TypeVar):
        return Dim.of(value.__name__)
    if isinstance(value, Dim):
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise ShapeError(f"{value!r} is not a dimension", location=here(), expected='4, "B", "2*D+1"') from None


def _parse(text: str) -> Size:
    if text.startswith("?") or text == "...":
        return Dim.of(text)
    if found := _LARGE.fullmatch(text.strip()):
        return int(found[1]) * 1024 ** (1 + "KMGT".index(found[2]))
    try:
        return from_ast(ast.parse(text.strip(), mode="eval").body, text)
    except SyntaxError:
        hint = 'write a name or arithmetic: "B", "2*D+1"'
        raise ShapeError(f'"{text}" is not a dimension', suggestion=hint) from None


def from_ast(node: ast.expr, text: str) -> Size:
    """The size that an expression means; `text` is what it was written as."""
    if isinstance(node, ast.Name):
        return Dim.of(node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -from_ast(node.operand, text)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](from_ast(node.left, text), from_ast(node.right, text))
    raise ShapeError(f'"{text}" is not a dimension', suggestion="use names, integers and + - * // %")


def number_of(value: Any) -> int:
    """A size as a number, which becomes an element of a tensor: any will do where types alone are asked for.

    Raises:
        UnknownSizeError: nobody knows it.
    """
    size = known(as_size(value))
    return 1 if isinstance(size, Dim) and TYPES_ALONE.get() else int(size)
