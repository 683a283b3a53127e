"""Symbolic dimensions: polynomials with integer coefficients over named sizes."""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Union

from tessera.core.errors import ShapeError

# A monomial is a sorted tuple of atoms; an atom is a name, or ("//" | "%", Dim, Dim).
Monomial = tuple
Size = Union[int, "Dim"]


class UnknownSizeError(ShapeError):
    """The number of a symbolic size is needed."""


# The sizes of the names in the function being traced; None outside a trace.
KNOWN_SIZES: ContextVar[Mapping[str, Size] | None] = ContextVar("sizes", default=None)
# Whether a program is traced for its types (`ts.check`) and never run.
ABSTRACT_TRACE: ContextVar[bool] = ContextVar("types alone", default=False)


def _accept_operands(kind: type) -> Callable[[Any], Any]:
    """Accept operands of a kind; another operand computes the result itself, with the size as a number."""

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def checked(self: Dim, other: Any) -> Any:
            return method(self, other) if isinstance(other, (kind, Dim)) else NotImplemented

        return checked

    return decorate


_of_sizes, _of_numbers = _accept_operands(numbers.Integral), _accept_operands(numbers.Real)


class Dim:
    """A symbolic size: `Dim.of("B")`, or arithmetic on such names.

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
        self.terms = tuple(sorted(((m, c) for m, c in terms.items() if c), key=lambda t: _monomial_order(t[0])))
        self._hash = hash(self.terms)

    @staticmethod
    def of(name: str) -> Dim:
        """The dim called `name`; "?" and "?n" are sizes without a name."""
        return Dim({(name,): 1})

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dim) and self.terms == other.terms

    @_of_sizes
    def __add__(self, other: Size) -> Size:
        terms = dict(self.terms)
        for monomial, count in _polynomial_terms(other):
            terms[monomial] = terms.get(monomial, 0) + count
        return _simplify(terms)

    @_of_sizes
    def __mul__(self, other: Size) -> Size:
        terms: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in _polynomial_terms(other):
                monomial = tuple(sorted(left + right, key=_atom_order))
                terms[monomial] = terms.get(monomial, 0) + a * b
        return _simplify(terms)

    def __neg__(self) -> Size:
        return self * -1

    @_of_sizes
    def __sub__(self, other: Size) -> Size:
        return self + -other

    @_of_sizes
    def __rsub__(self, other: Size) -> Size:
        return -self + other

    __radd__ = __add__
    __rmul__ = __mul__

    @_of_sizes
    def __floordiv__(self, other: Size) -> Size:
        exact = _divide_exactly(self, other)
        return exact if exact is not None else _simplify({(("//", self, other),): 1})

    @_of_sizes
    def __mod__(self, other: Size) -> Size:
        return 0 if _divide_exactly(self, other) is not None else _simplify({(("%", self, other),): 1})

    def __rfloordiv__(self, other: Size) -> Size:
        return _simplify({(("//", other, self),): 1}) if other else 0

    def __rmod__(self, other: Size) -> Size:
        return _simplify({(("%", other, self),): 1}) if other else 0

    def __repr__(self) -> str:
        return "+".join(_format_monomial(m, c) for m, c in self.terms).replace("+-", "-")

    def __int__(self) -> int:
        found = resolve_size(self)
        if isinstance(found, Dim):
            raise UnknownSizeError(
                f"the size {self} is not known yet", suggestion="call with arrays, whose sizes are known"
            )
        return found

    __index__ = __int__

    def __float__(self) -> float:
        return float(int(self))

    @_of_numbers
    def __truediv__(self, other: float) -> float:
        return int(self) / other

    @_of_numbers
    def __rtruediv__(self, other: float) -> float:
        return other / int(self)

    @_of_numbers
    def __pow__(self, other: float) -> float:
        return int(self) ** other

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


def resolve_size(size: Size) -> Size:
    """Replace names in a size by the sizes known to the function that is traced."""
    if not isinstance(size, Dim):
        return size
    return size.evaluate(KNOWN_SIZES.get() or {})  # type: ignore[arg-type]


def _polynomial_terms(size: Size) -> Iterable[tuple[Monomial, int]]:
    return size.terms if isinstance(size, Dim) else (((), int(size)),)


def _simplify(terms: Mapping[Monomial, int]) -> Size:
    kept = {m: c for m, c in terms.items() if c}
    if not kept:
        return 0
    return kept[()] if list(kept) == [()] else Dim(kept)


def _atom_order(atom: Any) -> str:
    return atom if isinstance(atom, str) else "~" + _format_atom(atom)


def _monomial_order(monomial: Monomial) -> tuple:
    return (not monomial, tuple(_atom_order(a) for a in monomial))


def _format_atom(atom: Any) -> str:
    if isinstance(atom, str):
        return atom
    sign, left, right = atom
    return f"(({left}) {sign} ({right}))"


def _format_monomial(monomial: Monomial, count: int) -> str:
    atoms = "*".join(_format_atom(a) for a in monomial)
    if not atoms:
        return str(count)
    return atoms if count == 1 else f"{count}*{atoms}" if count != -1 else f"-{atoms}"


def _divide_exactly(dim: Dim, divisor: Size) -> Size | None:
    """The exact quotient where every term divides, else None."""
    parts = list(_polynomial_terms(divisor))
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
    return _simplify(terms)


def _evaluate_atom(atom: Any, sizes: Mapping[str, int]) -> Size:
    if isinstance(atom, str):
        return sizes.get(atom, Dim.of(atom))
    sign, left, right = atom
    operate = operator.floordiv if sign == "//" else operator.mod
    return operate(_evaluate_size(left, sizes), _evaluate_size(right, sizes))


def _evaluate_size(size: Size, sizes: Mapping[str, int]) -> Size:
    return size.evaluate(sizes) if isinstance(size, Dim) else size


def _atom_names(atom: Any) -> Iterable[str]:
    if isinstance(atom, str):
        return (atom,)
    _, left, right = atom
    return symbol_names((left, right))


ANY_DIMS = Dim.of("...")  # in an annotation: any number of axes


def symbol_names(shape: Iterable[Size]) -> frozenset[str]:
    """The names a shape depends on."""
    return frozenset(name for size in shape if isinstance(size, Dim) for name in size.names())


def has_inexact_division(shape: Iterable[Size]) -> bool:
    """Whether a size depends on a division with unknown remainder, so that equality is undecidable.

    >>> has_inexact_division((Dim.of("D") // 4,)), has_inexact_division((4 * Dim.of("D") // 4,))
    (True, False)
    """
    return any(not isinstance(a, str) for s in shape if isinstance(s, Dim) for m, _ in s.terms for a in m)


def evaluate_shape(shape: Iterable[Size], sizes: Mapping[str, int]) -> tuple[Size, ...]:
    """A shape with the names in `sizes` replaced."""
    return tuple(_evaluate_size(size, sizes) for size in shape)
