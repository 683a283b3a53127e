"""Symbolic dimensions: polynomials over named sizes.

Coefficients are whole numbers, or fractions where constraints say that the term is whole: `B / 4` under `B % 4 == 0`.
Such a quotient is exact, so that four of them are `B` again; `B // 4` without that knowledge is an atom of its own.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Union, overload

from tessera.core.errors import Location, ShapeError, user_location

# A monomial is a sorted tuple of atoms; an atom is a name, or ("//" | "%", Dim, Dim).
Monomial = tuple
Size = Union[int, "Dim"]
Coefficient = int | Fraction


class UnknownSizeError(ShapeError):
    """The number of a symbolic size is needed."""


# The sizes of the names in the function being traced; None outside a trace.
KNOWN_SIZES: ContextVar[Mapping[str, Size] | None] = ContextVar("sizes", default=None)
# What a trace took to hold of symbolic sizes, as (size, relation, size); None where nobody asks.
SizeGuard = tuple[Size, str, Size]
SizeGuards = AbstractSet[SizeGuard]
# Each with the line that asked first.
SIZE_GUARDS: ContextVar[dict[SizeGuard, Location] | None] = ContextVar("size guards", default=None)
# The line of a program for which this package compares sizes, where it evaluates the source of a kernel; else None.
_FOR_PROGRAM: ContextVar[Location | None] = ContextVar("comparisons of a program", default=None)
# Typical sizes of the names, by which tiles of symbolic sizes are chosen; results do not depend on them.
SIZE_ESTIMATES: ContextVar[Mapping[str, int]] = ContextVar("size estimates", default=MappingProxyType({}))
DEFAULT_ESTIMATE = 128
# Numbers that the names are multiples of, by the constraints of the program.
SIZE_DIVISORS: ContextVar[Mapping[str, int]] = ContextVar("size divisors", default=MappingProxyType({}))
# The least values of the names, by the constraints of the program.
SIZE_MINIMA: ContextVar[Mapping[str, int]] = ContextVar("size minima", default=MappingProxyType({}))
# The greatest values of names and of products of them, by the constraints of the program.
SIZE_LIMITS: ContextVar[Mapping[tuple[str, ...], int]] = ContextVar("size limits", default=MappingProxyType({}))
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

    def __init__(self, terms: Mapping[Monomial, Coefficient]) -> None:
        self.terms = tuple(sorted(((m, c) for m, c in terms.items() if c), key=lambda t: _monomial_order(t[0])))
        self._hash = hash(self.terms)

    @staticmethod
    def of(name: str) -> Dim:
        """The dim called `name`; "?" and "?n" are sizes without a name."""
        return Dim({(name,): 1})

    def __hash__(self) -> int:
        """The hash of the polynomial; the lines of a program that is traced cannot look up a size by it."""
        if SIZE_GUARDS.get() is not None and _is_users_frame(sys._getframe(1)):
            raise UnknownSizeError(  # a table of numbers would not find it, and the program would be wrong for those
                f"the size {self} is looked up in a set or dict", suggestion="compare it, as in `n == 8 or n == 16`"
            )
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Whether both are the same polynomial; a program that is traced notes what its own lines found different."""
        if isinstance(other, Dim) and self.terms == other.terms:
            return True
        size = _as_whole_size(other)
        if size is None or SIZE_GUARDS.get() is None or not _is_users_frame(sys._getframe(1)):
            return False
        return _decide_equal(self, size)

    def __bool__(self) -> bool:
        """Whether the size is not 0, which is decided as a comparison is; a size that this package asks for is not."""
        if SIZE_GUARDS.get() is None or not _is_users_frame(sys._getframe(1)):
            return True
        least, most = find_size_bounds(self)
        return least > 0 or most < 0 or not _decide_equal(self, 0)

    @_of_sizes
    def __add__(self, other: Size) -> Size:
        terms = dict(self.terms)
        for monomial, count in _polynomial_terms(other):
            terms[monomial] = terms.get(monomial, 0) + count
        return _simplify(terms)

    @_of_sizes
    def __mul__(self, other: Size) -> Size:
        terms: dict[Monomial, Coefficient] = {}
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
        whole, rest = _split_multiple(self, other)
        exact = _divide_exactly(whole, other) if isinstance(rest, int) else None
        return exact + rest // other if exact is not None else _simplify({(("//", self, other),): 1})

    @_of_sizes
    def __mod__(self, other: Size) -> Size:
        whole, rest = _split_multiple(self, other)
        exact = isinstance(rest, int) and _divide_exactly(whole, other) is not None
        return rest % other if exact else _simplify({(("%", self, other),): 1})

    def __rfloordiv__(self, other: Size) -> Size:
        return _simplify({(("//", other, self),): 1}) if other else 0

    def __rmod__(self, other: Size) -> Size:
        return _simplify({(("%", other, self),): 1}) if other else 0

    def __repr__(self) -> str:
        return "+".join(_format_monomial(m, c) for m, c in self.terms).replace("+-", "-")

    @_of_sizes
    def __lt__(self, other: Size) -> bool:
        return _decide_order(self, "<", other)

    @_of_sizes
    def __le__(self, other: Size) -> bool:
        return _decide_order(self, "<=", other)

    @_of_sizes
    def __gt__(self, other: Size) -> bool:
        return _decide_order(other, "<", self)

    @_of_sizes
    def __ge__(self, other: Size) -> bool:
        return _decide_order(other, "<=", self)

    def __int__(self) -> int:
        found = resolve_size(self)
        if isinstance(found, Dim):
            raise UnknownSizeError(
                f"the size {self} is not known when the program is traced", location=user_location(),
                expected="a number",
                suggestion="loop over an axis by ts.scan; or give the size as a number: without dynamic=True a program "
                "is compiled for each size",
            )  # fmt: skip
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

    # What NumPy's functions of the same names call for an object.

    def sqrt(self) -> float:
        return math.sqrt(int(self))

    def log(self) -> float:
        return math.log(int(self))

    def log2(self) -> float:
        return math.log2(int(self))

    def evaluate(self, sizes: Mapping[str, int]) -> Size:
        """This dim with the names in `sizes` replaced by their sizes."""
        terms = _evaluate_terms(self, sizes)
        if isinstance(terms.get((), 0), Fraction):
            known = ", ".join(f"{name} = {sizes[name]}" for name in sorted(self.names() & sizes.keys()))
            raise ShapeError(f"{self} is not a whole number", expected="a multiple of the divisor", received=known)
        return _simplify(terms)

    def divide_exactly(self, number: int) -> Size:
        """The quotient, of which the caller knows that it is whole for every value of the names.

        >>> 4 * Dim.of("B").divide_exactly(4), Dim.of("B").divide_exactly(4)
        (B, B/4)
        """
        return _simplify({monomial: Fraction(count, number) for monomial, count in self.terms})

    def names(self) -> frozenset[str]:
        """The names this dim depends on."""
        return frozenset(name for m, _ in self.terms for atom in m for name in _atom_names(atom))


@contextmanager
def compare_for_program(place: Location | None) -> Iterator[None]:
    """A context whose comparisons of sizes are a program's, and become guards: for evaluators of its source line."""
    token = _FOR_PROGRAM.set(place or user_location())
    try:
        yield
    finally:
        _FOR_PROGRAM.reset(token)


def _is_users_frame(frame: Any) -> bool:
    """Whether a program compares: the package itself treats sizes that are not proven equal alike."""
    if _FOR_PROGRAM.get() is not None and frame.f_globals is not globals():
        return True
    return not str(frame.f_globals.get("__name__", "")).startswith("tessera.")


def note_guard(guard: SizeGuard) -> None:
    """Note what a program that is traced takes to hold of its sizes, with the line that asks."""
    guards = SIZE_GUARDS.get()
    if guards is not None:
        guards.setdefault(guard, _FOR_PROGRAM.get() or user_location())
        left, sign, right = guard
        if sign == "==" and (found := find_stated_divisor(left, right)) is not None:
            learn_divisor(*found)  # for the lines that follow


def find_needed_divisor(size: Size, number: Size) -> tuple[str, int] | None:
    """The name, and what it needs to be a multiple of, so that a size is one of a number; None of several names.

    >>> find_needed_divisor(4 * Dim.of("B"), 16)
    ('B', 4)
    """
    if not isinstance(size, Dim) or not isinstance(number, int) or number < 2 or len(size.terms) != 1:
        return None
    ((monomial, count),) = size.terms
    if len(monomial) != 1 or not isinstance(monomial[0], str):
        return None
    return monomial[0], (Fraction(number) / count).numerator


def find_stated_divisor(left: Size, right: Size) -> tuple[str, int] | None:
    """The name and the number of `name % number == 0`, where both sides are equal.

    >>> find_stated_divisor(Dim.of("B") % 4, 0), find_stated_divisor(2 * Dim.of("B") % 8, 0)
    (('B', 4), ('B', 4))
    """
    if right != 0 or not isinstance(left, Dim) or len(left.terms) != 1:
        return None
    ((monomial, _),) = left.terms
    if len(monomial) != 1 or isinstance(monomial[0], str) or monomial[0][0] != "%":
        return None
    return find_needed_divisor(*monomial[0][1:])


def learn_divisor(name: str, number: int) -> None:
    """Use what a name is a multiple of until the context of constraints around the trace ends."""
    known = SIZE_DIVISORS.get()
    number = math.lcm(number, known.get(name, 1))
    SIZE_DIVISORS.set({**known, name: number})
    SIZE_MINIMA.set({**SIZE_MINIMA.get(), name: round_up(_find_minimum(name), number)})


def resolve_size(size: Size) -> Size:
    """Replace names in a size by the sizes known to the function that is traced."""
    if not isinstance(size, Dim):
        return size
    return size.evaluate(KNOWN_SIZES.get() or {})  # type: ignore[arg-type]


# Order of symbolic sizes: interval arithmetic on the difference. Every name is a size of at least `LEAST_SIZE`, and
# between what the constraints of the program state.


LEAST_SIZE = 1


def proves_at_most(size: Size | float, limit: Size | float) -> bool:
    """Whether a size is at most another for every value of their names (each of at least 1).

    >>> s, b = Dim.of("S"), Dim.of("B")
    >>> proves_at_most(s, b * s), proves_at_most(b, s)
    (True, False)
    """
    if isinstance(size, float) or isinstance(limit, float):  # of an interval, which may be infinite
        return find_size_bounds(size)[1] <= find_size_bounds(limit)[0]
    gap = limit - size
    return gap >= 0 if isinstance(gap, int) else _find_least_value(gap) >= 0


def proves_less(size: Size | float, limit: Size | float) -> bool:
    """Whether a size is less than another for every value of their names.

    >>> proves_less(Dim.of("S") - 1, Dim.of("S"))
    True
    """
    if isinstance(size, float) or isinstance(limit, float):
        return find_size_bounds(size)[1] < find_size_bounds(limit)[0]
    return proves_at_most(size + 1, limit)


def _compare_sizes(a: Size, b: Size) -> int:
    if a == b:
        return 0
    if proves_at_most(a, b):
        return -1
    return 1 if proves_at_most(b, a) or repr(a) > repr(b) else -1


# A key of `sorted` for sizes: by what is proven of them, else by their text.
order_of_size = functools.cmp_to_key(_compare_sizes)


def estimate_size(size: Size) -> int:
    """A typical value of a size, for the choice of tiles.

    >>> estimate_size(2 * Dim.of("B")), estimate_size(7)
    (256, 7)
    """
    if not isinstance(size, Dim):
        return size
    known = SIZE_ESTIMATES.get()
    terms = _evaluate_terms(size, {name: known.get(name, DEFAULT_ESTIMATE) for name in size.names()})
    return math.floor(sum(terms.values()))  # no estimate needs to keep the constraints


def find_size_limit(size: Size) -> float:
    """The greatest value that the constraints of the program allow for a size; infinite where they say none.

    >>> find_size_limit(Dim.of("B")), find_size_limit(3)
    (inf, 3)
    """
    if not isinstance(size, Dim):
        return size
    if any(count < 0 for _, count in size.terms):
        return math.inf
    return _round(sum(count * _find_product_limit(monomial) for monomial, count in size.terms), math.floor)


def _find_product_limit(monomial: Monomial) -> float:
    limits = SIZE_LIMITS.get()
    return min(limits.get(monomial, math.inf), math.prod(limits.get((atom,), math.inf) for atom in monomial))


@overload
def ceil_divide(size: int, by: int) -> int: ...
@overload
def ceil_divide(size: Size, by: Size) -> Size: ...
def ceil_divide(size: Size, by: Size) -> Size:
    """The quotient, rounded up.

    >>> ceil_divide(65, 64), ceil_divide(64 * Dim.of("B"), 64), ceil_divide(Dim.of("B"), 64)
    (2, B, ((B+63) // (64)))
    """
    if isinstance(size, int) and isinstance(by, int):
        return -(-size // by)
    exact = _divide_exactly(size, by) if isinstance(size, Dim) else None
    return (size + by - 1) // by if exact is None else exact


@overload
def round_up(size: int, multiple: int) -> int: ...
@overload
def round_up(size: Size, multiple: Size) -> Size: ...
def round_up(size: Size, multiple: Size) -> Size:
    """The least multiple that is not less than the size.

    >>> round_up(65, 64), round_up(128, 64), round_up(0, 8)
    (128, 128, 0)
    """
    return ceil_divide(size, multiple) * multiple


def find_size_bounds(size: Size | float) -> tuple[float, float]:
    """The least and the greatest value that are proven for a size; infinite where there is none.

    >>> find_size_bounds(2 * Dim.of("B") - 1), find_size_bounds(Dim.of("B") % 64)
    ((1, inf), (0, 63))
    """
    if not isinstance(size, Dim):
        return size, size
    return _find_least_value(size), -_find_least_value(-size)


def find_size_divisor(size: Size, limit: int) -> int:
    """The greatest common divisor of a size, for every value of its names, and a limit.

    >>> find_size_divisor(24 * Dim.of("B") + 16, 64)
    8
    """
    divisors = (_find_term_divisor(monomial, count) for monomial, count in _polynomial_terms(size))
    return math.gcd(*divisors, limit) or limit


def _find_term_divisor(monomial: Monomial, count: Coefficient) -> int:
    """A divisor of a term, which is a whole number: of 3*B/4 it is 3, and 6 where B is a multiple of 8."""
    known = SIZE_DIVISORS.get()
    # The numerator of a reduced fraction p/q divides every whole number (p/q) * n.
    return math.prod((known.get(a, 1) for a in monomial if isinstance(a, str)), start=Fraction(count)).numerator


def _decide_order(size: Size, sign: str, limit: Size) -> bool:
    """Decide `size < limit` or `size <= limit`, where it is the same for every value of the names.

    Where the lines of a user's program ask, the example's sizes decide, and the answer becomes a guard.
    """
    least, most = find_size_bounds(size - limit)
    if most < 0 or (sign == "<=" and most <= 0):
        return True
    if least > 0 or (sign == "<" and least >= 0):
        return False
    guards = SIZE_GUARDS.get()
    if guards is None or not _is_users_frame(sys._getframe(3)):  # above the comparison and its check of operands
        raise UnknownSizeError(
            f"whether {size} {sign} {limit} is not known for every size",
            suggestion="call with arrays, whose sizes are known, or give this size when the program is built",
        )
    compare = operator.lt if sign == "<" else operator.le
    holds = compare(estimate_size(size), estimate_size(limit))
    note_guard((size, sign, limit) if holds else (limit, "<=" if sign == "<" else "<", size))
    return holds


def _as_whole_size(other: object) -> Size | None:
    """The size that is compared with another: a whole number of any kind, or a dim; None for anything else."""
    if isinstance(other, (int, Dim)):
        return other
    if isinstance(other, numbers.Integral) or (isinstance(other, numbers.Real) and float(other).is_integer()):
        return int(other)
    return None


def _decide_equal(size: Size, other: Size) -> bool:
    """Decide `size == other` for the lines of a user's program: the answer becomes a guard.

    Where a remainder or a quotient is compared, the example's sizes decide. Else the sizes are taken to differ: what
    holds at single sizes is no reason to give up all others.
    """
    least, most = find_size_bounds(size - other)
    if least > 0 or most < 0:
        return False
    equal = has_inexact_division((size, other)) and estimate_size(size) == estimate_size(other)
    note_guard((size, "==" if equal else "!=", other))
    return equal


def _find_least_value(size: Size) -> float:
    """The least value of a polynomial whose names are their least value + t for t >= 0: its terms in t bound it."""
    if not isinstance(size, Dim):
        return size
    shifted: dict[Monomial, Coefficient] = {}
    for monomial, count in size.terms:
        term: Size = 1
        for atom in monomial:  # names inside of a division keep their meaning
            term = term * (Dim.of(atom) + _find_minimum(atom) if isinstance(atom, str) else Dim({(atom,): 1}))
        _add_terms(shifted, term, count)
    least = sum(count * _bound_monomial(monomial, count > 0) for monomial, count in shifted.items() if count)
    return _round(least, math.ceil)


def _round(bound: float | Fraction, whole: Callable[[Any], int]) -> float:
    """A bound of a whole number, as a whole number or an infinity."""
    return whole(bound) if isinstance(bound, Fraction) else bound


def _add_terms(terms: dict[Monomial, Coefficient], size: Size, count: Coefficient) -> None:
    """Add a multiple of a size to the terms of a polynomial."""
    for monomial, own in _polynomial_terms(size):
        terms[monomial] = terms.get(monomial, 0) + own * count


def _find_minimum(name: str) -> int:
    return SIZE_MINIMA.get().get(name, LEAST_SIZE)


def _bound_shifted_name(name: str) -> tuple[float, float]:
    """The bounds of a name less its least value; constraints that exclude each other leave the least value."""
    return 0, max(SIZE_LIMITS.get().get((name,), math.inf) - _find_minimum(name), 0)


def _bound_monomial(monomial: Monomial, below: bool) -> float:
    """The least or greatest value of a product of shifted names, which are at least 0, and of divisions."""
    bounds = [_bound_shifted_name(atom) if isinstance(atom, str) else _bound_division(atom) for atom in monomial]
    if any(low < 0 for low, _ in bounds):
        return -math.inf if below else math.inf
    chosen = [low if below else high for low, high in bounds]
    return 0 if 0 in chosen else math.prod(chosen)


def _bound_division(atom: tuple) -> tuple[float, float]:
    """The bounds of a quotient or a remainder of sizes."""
    sign, left, right = atom
    (least, most), (low, high) = find_size_bounds(left), find_size_bounds(right)
    if least < 0 or low < 1:
        return -math.inf, math.inf
    if sign == "%":
        return 0, high - 1
    return (0 if high == math.inf else least // high), (most if most == math.inf else most // low)


def _polynomial_terms(size: Size) -> Iterable[tuple[Monomial, Coefficient]]:
    return size.terms if isinstance(size, Dim) else (((), int(size)),)


def _simplify(terms: Mapping[Monomial, Coefficient]) -> Size:
    kept = {m: c.numerator if c.denominator == 1 else c for m, c in terms.items() if c}
    if not kept:
        return 0
    return kept[()] if list(kept) == [()] else Dim(kept)  # type: ignore[return-value]  # a constant is whole


def _atom_order(atom: Any) -> str:
    return atom if isinstance(atom, str) else "~" + _format_atom(atom)


def _monomial_order(monomial: Monomial) -> tuple:
    return (not monomial, tuple(_atom_order(a) for a in monomial))


def _format_atom(atom: Any) -> str:
    if isinstance(atom, str):
        return atom
    sign, left, right = atom
    return f"(({left}) {sign} ({right}))"


def _format_monomial(monomial: Monomial, count: Coefficient) -> str:
    if count.denominator != 1:
        return f"{_format_monomial(monomial, count.numerator)}/{count.denominator}"
    atoms = "*".join(_format_atom(a) for a in monomial)
    if not atoms:
        return str(count)
    return atoms if count == 1 else f"{count}*{atoms}" if count != -1 else f"-{atoms}"


def _split_multiple(size: Dim, number: Size) -> tuple[Size, Size]:
    """The terms that are multiples of a number, and the others: of 4*B+1 and 4 they are 4*B and 1."""
    if not isinstance(number, int) or number < 1:
        return size, 0
    split: tuple[dict[Monomial, Coefficient], dict[Monomial, Coefficient]] = {}, {}
    for monomial, count in size.terms:
        split[bool(_find_term_divisor(monomial, count) % number)][monomial] = count
    return _simplify(split[0]), _simplify(split[1])


def _divide_exactly(dim: Size, divisor: Size) -> Size | None:
    """The exact quotient where every term divides, by its factor or by what constraints say of its names, else None."""
    parts = list(_polynomial_terms(divisor))
    if len(parts) != 1:
        return 1 if dim == divisor else None
    (atoms, scale) = parts[0]
    if not scale:
        raise ShapeError("a dimension is divided by zero")
    terms: dict[Monomial, Coefficient] = {}
    for monomial, count in _polynomial_terms(dim):
        rest = list(monomial)
        if any(rest.count(a) < atoms.count(a) for a in atoms):
            return None
        for atom in atoms:
            rest.remove(atom)
        whole = _find_term_divisor(monomial, count) if not atoms else _find_term_divisor(tuple(rest), 1) * count
        if (whole / Fraction(scale)).denominator != 1:
            return None
        terms[tuple(rest)] = Fraction(count) / scale
    return _simplify(terms)


def _evaluate_terms(size: Dim, sizes: Mapping[str, int]) -> dict[Monomial, Coefficient]:
    """The terms of a polynomial whose names in `sizes` are replaced by their sizes."""
    terms: dict[Monomial, Coefficient] = {}
    for monomial, count in size.terms:
        product: Size = 1
        for atom in monomial:
            product = product * _evaluate_atom(atom, sizes)
        _add_terms(terms, product, count)
    return {m: c.numerator if c.denominator == 1 else c for m, c in terms.items() if c}


def _evaluate_atom(atom: Any, sizes: Mapping[str, int]) -> Size:
    if isinstance(atom, str):
        return sizes.get(atom, Dim.of(atom))
    sign, left, right = (_simplify(_evaluate_terms(part, sizes)) if isinstance(part, Dim) else part for part in atom)
    return operator.floordiv(left, right) if sign == "//" else operator.mod(left, right)


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
