"""Symbolic dimensions: polynomials with integer coefficients over named sizes."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, Union

from tessera.errors import ShapeError

# A monomial is a sorted tuple of atoms; an atom is a name, or ("//" | "%", Dim, Dim).
Monomial = tuple
Size = Union[int, "Dim"]


class UnknownSizeError(ShapeError):
    """A size was asked for that is known only by name."""


class Dim:
    """A size known only by name: `Dim.of("B")`, or arithmetic on such names.

    Two dims are equal when they are the same polynomial; an expression whose names
    all cancel becomes a plain int.

    >>> b = Dim.of("B")
    >>> 2 * b + b
    3*B
    >>> (b + 1) - b
    1
    """

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms = tuple(sorted(((m, c) for m, c in terms.items() if c), key=lambda t: _order(t[0])))
        self._hash = hash(self.terms)

    @staticmethod
    def of(name: str) -> Dim:
        """The dim called `name`; "?" and "?n" are sizes without a name."""
        return Dim({(name,): 1})

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and self.terms == other.terms

    def __add__(self, other: Size) -> Size:
        terms = dict(self.terms)
        for monomial, count in _terms(other):
            terms[monomial] = terms.get(monomial, 0) + count
        return _simple(terms)

    def __mul__(self, other: Size) -> Size:
        terms: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in _terms(other):
                monomial = tuple(sorted(left + right, key=_atom_order))
                terms[monomial] = terms.get(monomial, 0) + a * b
        return _simple(terms)

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Size) -> Size:
        return self + -other

    def __rsub__(self, other: Size) -> Size:
        return -self + other

    __radd__ = __add__
    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        exact = _divide(self, other)
        return exact if exact is not None else _simple({(("//", self, other),): 1})

    def __mod__(self, other: Size) -> Size:
        return 0 if _divide(self, other) is not None else _simple({(("%", self, other),): 1})

    def __rfloordiv__(self, other: Size) -> Size:
        return _simple({(("//", other, self),): 1}) if other else 0

    def __rmod__(self, other: Size) -> Size:
        return _simple({(("%", other, self),): 1}) if other else 0

    def __repr__(self) -> str:
        return "+".join(_text(m, c) for m, c in self.terms).replace("+-", "-")

    def __int__(self) -> int:
        raise UnknownSizeError(
            f"the size {self} is not known yet", suggestion="call with arrays, whose sizes are known"
        )

    __index__ = __int__

    def evaluate(self, sizes: Mapping[str, int]) -> Size:
        """This dim with the names in `sizes` replaced by their sizes."""
        total: Size = 0
        for monomial, count in self.terms:
            product: Size = count
            for atom in monomial:
                product = product * _evaluate_atom(atom, sizes)
            total = total + product
        return total

    def names(self) -> frozenset[str]:
        """The names this dim depends on."""
        return frozenset(name for m, _ in self.terms for atom in m for name in _atom_names(atom))


def _terms(size: Size) -> Iterable[tuple[Monomial, int]]:
    return size.terms if isinstance(size, Dim) else (((), int(size)),)


def _simple(terms: Mapping[Monomial, int]) -> Size:
    kept = {m: c for m, c in terms.items() if c}
    if not kept:
        return 0
    return kept[()] if list(kept) == [()] else Dim(kept)


def _atom_order(atom: Any) -> str:
    return atom if isinstance(atom, str) else "~" + _atom_text(atom)


def _order(monomial: Monomial) -> tuple:
    return (not monomial, tuple(_atom_order(a) for a in monomial))


def _atom_text(atom: Any) -> str:
    if isinstance(atom, str):
        return atom
    sign, left, right = atom
    return f"(({left}) {sign} ({right}))"


def _text(monomial: Monomial, count: int) -> str:
    atoms = "*".join(_atom_text(a) for a in monomial)
    if not atoms:
        return str(count)
    return atoms if count == 1 else f"{count}*{atoms}" if count != -1 else f"-{atoms}"


def _divide(dim: Dim, divisor: Size) -> Size | None:
    """The exact quotient where every term divides, else None."""
    parts = list(_terms(divisor))
    if len(parts) != 1:
        return 1 if dim == divisor else None
    (atoms, scale) = parts[0]
    if not scale:
        raise ShapeError("a dimension is divided by zero")
    terms: dict[Monomial, int] = {}
    for monomial, count in dim.terms:
        rest = list(monomial)
        if count % scale or any(rest.count(a) < atoms.count(a) for a in atoms):
            return None
        for atom in atoms:
            rest.remove(atom)
        terms[tuple(rest)] = count // scale
    return _simple(terms)


def _evaluate_atom(atom: Any, sizes: Mapping[str, int]) -> Size:
    if isinstance(atom, str):
        return sizes.get(atom, Dim.of(atom))
    sign, left, right = atom
    operate = operator.floordiv if sign == "//" else operator.mod
    return operate(_evaluate(left, sizes), _evaluate(right, sizes))


def _evaluate(size: Size, sizes: Mapping[str, int]) -> Size:
    return size.evaluate(sizes) if isinstance(size, Dim) else size


def _atom_names(atom: Any) -> Iterable[str]:
    if isinstance(atom, str):
        return (atom,)
    _, left, right = atom
    return symbols((left, right))


_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


ANY_DIMS = Dim.of("...")  # in an annotation: any number of axes


def as_size(value: int | str | Dim | TypeVar) -> Size:
    """A size from an int, a name, an expression such as "2*D+1" or a type variable (`def f[B](...)`).

    >>> as_size("2*D") // 2
    D
    """
    if isinstance(value, str):
        return _parse(value)
    if isinstance(value, TypeVar):
        return Dim.of(value.__name__)
    return value if isinstance(value, Dim) else int(value)


def _parse(text: str) -> Size:
    if text.startswith("?") or text == "...":
        return Dim.of(text)
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


def symbols(shape: Iterable[Size]) -> frozenset[str]:
    """The names a shape depends on."""
    return frozenset(name for size in shape if isinstance(size, Dim) for name in size.names())


def divided(shape: Iterable[Size]) -> bool:
    """Whether a size rests on a division whose remainder is not known, so that equality does not decide.

    >>> divided((as_size("D // 4"),)), divided((as_size("4*D") // 4,))
    (True, False)
    """
    return any(not isinstance(a, str) for s in shape if isinstance(s, Dim) for m, _ in s.terms for a in m)


def evaluate_shape(shape: Iterable[Size], sizes: Mapping[str, int]) -> tuple[Size, ...]:
    """A shape with the names in `sizes` replaced."""
    return tuple(_evaluate(size, sizes) for size in shape)
