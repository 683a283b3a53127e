"""Index arithmetic as data: sums of digits of iteration dims, so that reshapes fold away.

A digit is (i // divisor) % modulus for the index i of one dim. Splitting an axis makes digits and merging one
adds them up again, scaled; `divide` finds where one undoes the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Digit:
    """(i // divisor) % modulus, where i runs over `extent` values; modulus 0 means without one."""

    dim: int
    extent: int
    divisor: int = 1
    modulus: int = 0

    @property
    def size(self) -> int:
        """It lies from 0 to before this."""
        return self.modulus or -(-self.extent // self.divisor)

    @property
    def dims(self) -> frozenset[int]:
        """The dims it depends on."""
        return frozenset((self.dim,))


@dataclass(frozen=True)
class Opaque:
    """An integer that is no sum of digits: read from memory, or a division that does not come out even.

    `key` says what it is; `size` is 0 where nothing is known of its range.
    """

    key: Any
    dims: frozenset[int]
    size: int = 0


Atom = Digit | Opaque


@dataclass(frozen=True)
class Expr:
    """A constant plus atoms times coefficients."""

    constant: int = 0
    terms: tuple[tuple[Atom, int], ...] = ()

    @property
    def dims(self) -> frozenset[int]:
        """The dims it depends on."""
        return frozenset().union(*(a.dims for a, _ in self.terms))

    @property
    def is_clean(self) -> bool:
        """Whether it is made of digits only."""
        return all(isinstance(a, Digit) for a, _ in self.terms)

    def bounds(self) -> tuple[int, int] | None:
        """The least and greatest value, where the range of every atom is known."""
        if any(not a.size for a, _ in self.terms):
            return None
        reach = [c * (a.size - 1) for a, c in self.terms]
        return self.constant + sum(min(r, 0) for r in reach), self.constant + sum(max(r, 0) for r in reach)

    def within(self, low: int, high: int) -> bool:
        """Whether it is sure to lie from `low` to before `high`."""
        found = self.bounds()
        return found is not None and low <= found[0] and found[1] < high


ZERO = Expr()


def const(value: int) -> Expr:
    """A number."""
    return Expr(value)


def atom(of: Atom) -> Expr:
    """One atom; what can only be 0 is 0."""
    return ZERO if of.size == 1 else Expr(0, ((of, 1),))


def index(dim: int, extent: int) -> Expr:
    """The index of a dim."""
    return atom(Digit(dim, extent))


def add(*exprs: Expr) -> Expr:
    """The sum."""
    terms: dict[Atom, int] = {}
    for each in exprs:
        for a, c in each.terms:
            terms[a] = terms.get(a, 0) + c
    kept = _joined({a: c for a, c in terms.items() if c})
    return Expr(sum(e.constant for e in exprs), tuple(sorted(kept.items(), key=_order)))


def scale(expr: Expr, by: int) -> Expr:
    """`expr` times a number."""
    return Expr(expr.constant * by, tuple((a, c * by) for a, c in expr.terms)) if by else ZERO


def _order(term: tuple[Atom, int]) -> tuple[int, int, int]:
    a = term[0]
    return (0, a.dim, -a.divisor) if isinstance(a, Digit) else (1, 0, 0)


def _joined(terms: dict[Atom, int]) -> dict[Atom, int]:
    """Digits of one dim that stand next to each other become one: (i // 4) * 4 + i % 4 = i."""
    digits = [(a, c) for a, c in terms.items() if isinstance(a, Digit)]
    for low, c in digits:
        for high, k in digits:
            if low.modulus and high.dim == low.dim and _follows(high, low) and k == c * low.modulus:
                rest = {a: n for a, n in terms.items() if a not in (low, high)}
                whole = Digit(low.dim, low.extent, low.divisor, low.modulus * high.modulus)
                return _joined({**rest, whole: rest.get(whole, 0) + c})
    return terms


def _follows(high: Digit, low: Digit) -> bool:
    return high.divisor == low.divisor * low.modulus


def divide(expr: Expr, by: int) -> tuple[Expr, Expr]:
    """The floor quotient and the remainder by a positive number."""
    if by == 1:
        return expr, ZERO
    even = [(a, c // by) for a, c in expr.terms if c % by == 0]
    rest = Expr(expr.constant % by, tuple((a, c) for a, c in expr.terms if c % by))
    quotient, remainder = _uneven(rest, by)
    return add(Expr(expr.constant // by, tuple(even)), quotient), remainder


def _uneven(rest: Expr, by: int) -> tuple[Expr, Expr]:
    """Quotient and remainder of what does not divide term by term."""
    if rest.within(0, by):
        return ZERO, rest
    for unit in sorted({c for _, c in rest.terms if c > 0 and by % c == 0}, reverse=True):
        small = Expr(rest.constant % unit, tuple((a, c) for a, c in rest.terms if c % unit))
        if unit > 1 and small.within(0, unit):
            big = Expr(rest.constant // unit, tuple((a, c // unit) for a, c in rest.terms if c % unit == 0))
            quotient, remainder = divide(big, by // unit)
            return quotient, add(scale(remainder, unit), small)
    digit = _single(rest)
    if digit is not None and digit.modulus % by == 0:
        return _digit(digit, digit.divisor * by, digit.modulus // by), _digit(digit, digit.divisor, by)
    return atom(Opaque(("//", rest, by), rest.dims)), atom(Opaque(("%", rest, by), rest.dims, by))


def _single(expr: Expr) -> Digit | None:
    if expr.constant == 0 and len(expr.terms) == 1 and expr.terms[0][1] == 1:
        only = expr.terms[0][0]
        return only if isinstance(only, Digit) else None
    return None


def _digit(of: Digit, divisor: int, modulus: int) -> Expr:
    if divisor >= of.extent:
        return ZERO
    return atom(Digit(of.dim, of.extent, divisor, 0 if divisor * modulus >= of.extent else modulus))


def linear(indices: Iterable[Expr], shape: Iterable[int]) -> Expr:
    """The row-major place of an index in a shape."""
    place = ZERO
    for i, n in zip(indices, shape, strict=True):
        place = add(scale(place, n), i)
    return place


def unravel(place: Expr, shape: tuple[int, ...]) -> tuple[Expr, ...]:
    """The index in a shape of a row-major place."""
    found: list[Expr] = []
    for n in reversed(shape[1:]):
        place, i = divide(place, n) if n else (place, ZERO)
        found.append(i)
    return (place, *reversed(found)) if shape else ()
