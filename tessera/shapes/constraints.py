"""What is required of sizes: `require("D % 8 == 0")`, and names for them: `dims("B S D")`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from tessera.errors import ShapeError, here
from tessera.shapes.dim import SIZES, Dim, Size
from tessera.shapes.reading import from_ast

F = TypeVar("F")
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def dims(names: str) -> tuple[Dim, ...]:
    """Sizes known by name, for annotations.

    >>> B, D = dims("B D")
    >>> 2 * B * D
    2*B*D
    """
    return tuple(Dim.of(name) for name in names.replace(",", " ").split())


class Requirement:
    """A condition on sizes: a decorator of the function whose names it speaks of."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.clauses = _parse(text)
        self.names = frozenset(n for left, _, right in self.clauses for n in _names(left) | _names(right))

    def __call__(self, function: F) -> F:
        function.__requires__ = (*getattr(function, "__requires__", ()), self)  # type: ignore[attr-defined]
        return function

    def holds(self, sizes: Mapping[str, Size]) -> bool | None:
        """Whether the sizes fulfil it; None where they are not known well enough to tell."""
        found = [_decide(left, compare, right, sizes) for left, compare, right in self.clauses]
        if False in found:
            return False
        return None if None in found else True

    def check(self, sizes: Mapping[str, Size]) -> None:
        """Raise a ShapeError where the sizes break it."""
        if self.holds(sizes) is False:
            known = ", ".join(f"{n} = {sizes[n]}" for n in sorted(self.names))
            raise ShapeError(f"{self.text} does not hold", expected=self.text, received=known)


def require(text: str) -> Requirement:
    """Require a relation of sizes: as a decorator of a function, or as a statement in it.

    Shapes: the names are those of the function's annotations. A size that is still symbolic is taken to fulfil it.

    Raises:
        ShapeError: sizes that are known do not fulfil it, or `text` is no comparison.

    >>> require("D % 8 == 0").holds({"D": 768})
    True
    """
    requirement = Requirement(text)
    sizes = SIZES.get()
    if sizes is not None:
        try:
            requirement.check(sizes)
        except ShapeError as error:
            raise error.at(here()) from None
    return requirement


def requirements(function: Any) -> tuple[Requirement, ...]:
    """What decorators require of the sizes of a function's annotations."""
    return getattr(function, "__requires__", ())


@contextmanager
def known_sizes(sizes: Mapping[str, Size]) -> Iterator[None]:
    """Let `require` inside know these sizes."""
    token = SIZES.set(sizes)
    try:
        yield
    finally:
        SIZES.reset(token)


def _names(size: Size) -> frozenset[str]:
    return size.names() if isinstance(size, Dim) else frozenset()


def _decide(left: Size, compare: Callable[[Any, Any], bool], right: Size, sizes: Mapping[str, Size]) -> bool | None:
    if not (_names(left) | _names(right)) <= sizes.keys():
        return None
    a, b = (s.evaluate(sizes) if isinstance(s, Dim) else s for s in (left, right))  # type: ignore[arg-type]
    gap = a - b
    return compare(gap, 0) if isinstance(gap, int) else None


def _parse(text: str) -> list[tuple[Size, Callable[[Any, Any], bool], Size]]:
    hint = 'write a comparison of sizes: "D % 8 == 0"'
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ShapeError(f'"{text}" is not a constraint', suggestion=hint) from None
    parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    clauses = []
    for part in parts:
        if not isinstance(part, ast.Compare) or any(type(o) not in _COMPARE for o in part.ops):
            raise ShapeError(f'"{text}" is not a constraint', suggestion=hint)
        sides = [from_ast(s, text) for s in (part.left, *part.comparators)]
        clauses += [(sides[i], _COMPARE[type(o)], sides[i + 1]) for i, o in enumerate(part.ops)]
    return clauses
