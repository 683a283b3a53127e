"""Coverage by check: which blocks of the package each case and each test executes, recorded once.

A block is a list of statements that run one after the other: the body of a function, a branch or a loop, or a lambda.
In a child process the package is imported from changed trees: each block first marks its number.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

MARKS = "__mutation_marks__"
BODIES = ("body", "orelse", "finalbody")


def iterate_blocks(tree: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, str]]:
    """The blocks of functions, in the order of the text: (node, field with the statements)."""
    for name, value in ast.iter_fields(tree):
        is_body = name in BODIES and isinstance(value, list) and value and isinstance(value[0], ast.stmt)
        starts = isinstance(tree, (ast.FunctionDef, ast.Lambda)) and name == "body"
        if starts or (inside and is_body and not isinstance(tree, ast.ClassDef)):
            yield tree, name
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from iterate_blocks(child, starts or (inside and not isinstance(tree, ast.ClassDef)))


def find_span(node: Any, name: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The first and last (line, column) of a block."""
    value = getattr(node, name)
    first, last = (value[0], value[-1]) if isinstance(value, list) else (value, value)
    return (first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)


def find_block(tree: ast.AST, place: tuple[int, int]) -> int | None:
    """The number of the innermost block that holds a place; None for code that runs at import.

    >>> find_block(ast.parse("def f(x):\\n    if x:\\n        return 1\\n    return 2"), (3, 15))
    1
    """
    spans = [find_span(*b) for b in iterate_blocks(tree)]
    holding = [i for i, (first, last) in enumerate(spans) if first <= place < last]
    return max(holding, key=lambda i: spans[i][0]) if holding else None


def mark_blocks(tree: ast.Module, first: int) -> ast.Module:
    """The tree with a statement at the start of each block, which marks its number."""
    for number, (node, name) in enumerate(list(iterate_blocks(tree)), first):
        value = getattr(node, name)
        if isinstance(node, ast.Lambda):
            mark = ast.parse(f"{MARKS}.__setitem__({number}, 1)", mode="eval").body
            node.body = ast.Subscript(ast.Tuple([mark, value], ast.Load()), ast.Constant(1), ast.Load())
        else:
            documented = isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None
            value.insert(int(documented), ast.parse(f"{MARKS}[{number}] = 1").body[0])
    return ast.fix_missing_locations(tree)


class ChangedFiles:
    """A finder of modules that loads other code for some files."""

    def __init__(self, code: dict[str, CodeType]) -> None:
        self.code = code

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module's spec, with a loader of the changed code."""
        if not name.startswith("tessera"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin in self.code:
            spec.loader = _CodeLoader(name, spec.origin, self.code[spec.origin])
        return spec

    def install(self) -> None:
        """Use the changed files from here on in this process."""
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]


class _CodeLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self.code = code

    def get_code(self, fullname: str) -> Any:
        """The changed code; compiled files on disk are neither read nor written."""
        return self.code


class Recorder:
    """The marks of this process, in which the package is imported with them; `take` gives those since the last time."""

    def __init__(self, code: dict[str, CodeType], total: int) -> None:
        self.marks = bytearray(total)
        setattr(builtins, MARKS, self.marks)
        ChangedFiles(code).install()

    def take(self) -> bytes:
        """The blocks since the last call, one bit for each."""
        found = np.packbits(np.frombuffer(self.marks, np.uint8)).tobytes()
        self.marks[:] = bytes(len(self.marks))
        return found


def compile_marked(starts: dict[str, int]) -> dict[str, CodeType]:
    """The code of files with marks, from the number of the first block of each."""
    trees = {path: mark_blocks(ast.parse(Path(path).read_text()), first) for path, first in starts.items()}
    return {path: compile(tree, path, "exec", dont_inherit=True) for path, tree in trees.items()}


def number_blocks(files: list[Path]) -> tuple[dict[str, int], int]:
    """The number of the first block of each file, and how many blocks there are."""
    starts, total = {}, 0
    for path in files:
        starts[str(path)] = total
        total += len(list(iterate_blocks(ast.parse(path.read_text()))))
    return starts, total
