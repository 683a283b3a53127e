"""Mutation operators: where a syntax tree can be changed, and the change (DeMillo, Lipton, Sayward 1978).

A comparison becomes its neighbour, `and` becomes `or`, arithmetic becomes its opposite or swaps its operands, `min`
becomes `max`, a number changes by one, a truth value turns, a condition is negated, a guard (an `if` that only leaves)
or a statement is deleted. Annotations, decorators, the texts of errors and `strict=` stay as they are.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
               ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}  # fmt: skip
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
              ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift}  # fmt: skip
ORDERED = (ast.Sub, ast.FloorDiv, ast.Mod, ast.LShift, ast.RShift, ast.Div)
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
CONDITIONS = (ast.If, ast.IfExp)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _is_statement(node: Any) -> bool:
    stores = isinstance(node, ast.Assign) and all(isinstance(t, (ast.Subscript, ast.Attribute)) for t in node.targets)
    return (
        stores or isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
    )


def _is_small(node: Any) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1000


def _is_arithmetic(node: Any, operators: Iterable[type]) -> bool:
    return isinstance(node, ast.BinOp) and type(node.op) in operators and not isinstance(node.left, ast.Constant)


# Which nodes an operator changes.
WHERE: dict[str, Callable[[Any], bool]] = {
    "comparison": lambda n: isinstance(n, ast.Compare) and type(n.ops[0]) in COMPARISONS,
    "arithmetic": lambda n: _is_arithmetic(n, ARITHMETIC),
    "operands": lambda n: _is_arithmetic(n, ORDERED),
    "and/or": lambda n: isinstance(n, ast.BoolOp),
    "constant + 1": _is_small,
    "constant - 1": _is_small,
    "truth": lambda n: isinstance(n, ast.Constant) and type(n.value) is bool,
    "condition": lambda n: isinstance(n, CONDITIONS) or (isinstance(n, ast.comprehension) and bool(n.ifs)),
    "guard": lambda n: isinstance(n, ast.If) and len(n.body) == 1 and isinstance(n.body[0], LEAVES) and not n.orelse,
    "call": lambda n: isinstance(n, ast.Call) and _name(n.func) in CALLS,
    "statement": _is_statement,
}  # fmt: skip


def list_mutations(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The nodes that an operator changes, with its name."""
    for node in _walk_code(tree):
        yield from ((node, kind) for kind, fits in WHERE.items() if fits(node))


def _walk_code(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, decorators, what a raise statement says, and whether a zip asserts equal lengths."""
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list") or isinstance(node, (ast.Raise, ast.JoinedStr)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (isinstance(child, ast.keyword) and child.arg == "strict"):
                yield from _walk_code(child)


def apply_mutation(node: Any, kind: str) -> None:
    """Change a node in place."""
    if kind == "comparison":
        node.ops[0] = COMPARISONS[type(node.ops[0])]()
    elif kind == "arithmetic":
        node.op = ARITHMETIC[type(node.op)]()
    elif kind == "operands":
        node.left, node.right = node.right, node.left
    elif kind == "and/or":
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif kind == "call":
        setattr(node.func, "id" if isinstance(node.func, ast.Name) else "attr", CALLS[_name(node.func)])
    elif isinstance(node, ast.Constant):
        node.value = not node.value if kind == "truth" else node.value + (1 if kind.endswith("+ 1") else -1)
    else:
        _change_flow(node, kind)


def _change_flow(node: Any, kind: str) -> None:
    if kind == "guard":
        node.body[0] = ast.copy_location(ast.Pass(), node.body[0])
    elif isinstance(node, ast.comprehension):
        node.ifs[0] = ast.UnaryOp(ast.Not(), node.ifs[0])
    elif kind == "condition":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)
    else:  # an assignment: nothing is stored
        node.targets, node.value = [ast.Name("_", ast.Store())], ast.Constant(None)
        node.__class__ = ast.Assign


@dataclass(frozen=True)
class Mutant:
    """A bug: its component, file, line and kind, what changes, and the code of the changed file."""

    component: str
    file: str
    line: int
    kind: str
    change: str
    tree: ast.Module
    position: int = 0  # the column, which tells apart the blocks of one line

    @property
    def place(self) -> tuple[str, str, str, int]:
        """What tells it apart from others."""
        return self.file, self.kind, self.change, self.line


def draw_mutant(component: str, files: list[Path], root: Path, draw: random.Random) -> Mutant:
    """A random mutant: a file in proportion to its size, an operator among those that fit it, one of its places."""
    while True:
        path = draw.choices(files, [p.stat().st_size for p in files])[0]
        tree = ast.parse(path.read_text())
        found = list(list_mutations(tree))
        if not found:
            continue
        kind = draw.choice(sorted({k for _, k in found}))
        node: Any = draw.choice([n for n, k in found if k == kind])
        place = node.target if isinstance(node, ast.comprehension) else node
        before = ast.unparse(copy.copy(node))
        line, column = place.lineno, place.col_offset
        apply_mutation(node, kind)
        change = f"{_shorten(before)} -> {_shorten(ast.unparse(node))}"
        return Mutant(
            component, str(path.relative_to(root)), line, kind, change, ast.fix_missing_locations(tree), column
        )


def _shorten(text: str) -> str:
    """The first line of a text, at most 100 characters of it."""
    first, _, rest = text.strip().partition("\n")
    return first[:100] + (" ..." if rest or len(first) > 100 else "")
