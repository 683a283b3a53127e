"""Shapes: sizes parsed from annotations, broadcasting and axis rules, matching of annotated with actual shapes, size
constraints.

Symbolic sizes themselves are in `tessera.core.symbolic_dim`.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, TypeVar

from tessera.core.errors import UNKNOWN, ArgumentError, Location, ShapeError, user_location
from tessera.core.symbolic_dim import (
    ABSTRACT_TRACE,
    ANY_DIMS,
    KNOWN_SIZES,
    LEAST_SIZE,
    SIZE_DIVISORS,
    SIZE_LIMITS,
    SIZE_MINIMA,
    Dim,
    Size,
    UnknownSizeError,
    evaluate_shape,
    find_stated_divisor,
    resolve_size,
    round_up,
    symbol_names,
)

# Matching of annotated shapes with the shapes of arguments.


ShapePattern = Sequence[Size]


class ShapeMismatch(NamedTuple):
    """A pair of shapes that does not match (its number in the list), and the reason."""

    number: int
    problem: str


class _AxisPair(NamedTuple):
    number: int
    axis: int
    want: Size
    got: Size


def bind_shapes(pairs: Sequence[tuple[ShapePattern, ShapePattern]], sizes: dict[str, Size]) -> ShapeMismatch | None:
    """Match annotated shapes with actual ones and add to `sizes`; the first mismatch, or None.

    Plain names are bound by their first use in any of the shapes, so an expression may come before its name; a
    name that stands only in a linear expression is solved for. "?" fits every size, "..." any number of axes.

    >>> found = {}
    >>> bind_shapes([((2 * Dim.of("B"),), (8,)), ((Dim.of("B"),), (4,))], found), found
    (None, {'B': 4})
    """
    axes: list[_AxisPair] = []
    for number, (pattern, shape) in enumerate(pairs):
        aligned = _align_axes(number, pattern, shape)
        if isinstance(aligned, ShapeMismatch):
            return aligned
        axes += aligned
    for pair in axes:
        name = find_plain_name(pair.want)
        if name is not None and sizes.setdefault(name, pair.got) != pair.got and not name.startswith("?"):
            known = sizes[name]
            said = f"expected {name}, received" if str(known) == name else f"{name} is {known} elsewhere and"
            return _make_mismatch(pair, f"{said} {pair.got}" + ("" if str(known) == name else " here"))
    return next((m for pair in axes if (m := _check_pair(pair, sizes))), None)


def bind_shape(pattern: ShapePattern, shape: ShapePattern, sizes: dict[str, Size]) -> str | None:
    """Match one annotated shape with an actual one and add to `sizes`; the mismatch, or None."""
    found = bind_shapes([(pattern, shape)], sizes)
    return found.problem if found else None


def _align_axes(number: int, pattern: ShapePattern, shape: ShapePattern) -> list[_AxisPair] | ShapeMismatch:
    """Pair the axes of both shapes, without those that "..." matches."""
    holes = [i for i, want in enumerate(pattern) if want == ANY_DIMS]
    at_least = len(pattern) - len(holes)
    if len(shape) < at_least or (not holes and len(shape) > at_least):
        bound = "at least " if holes else ""
        return ShapeMismatch(number, f"rank {bound}{at_least} expected, rank {len(shape)} received")
    axes = list(enumerate(shape))
    if holes:
        after = len(pattern) - holes[0] - 1
        axes = axes[: holes[0]] + axes[len(axes) - after :]
    wanted = [want for want in pattern if want != ANY_DIMS]
    return [_AxisPair(number, axis, want, got) for want, (axis, got) in zip(wanted, axes, strict=True)]


def _check_pair(pair: _AxisPair, sizes: dict[str, Size]) -> ShapeMismatch | None:
    """Check a pair of sizes against the names bound so far."""
    if not isinstance(pair.want, Dim):
        return None if pair.want == pair.got else _make_mismatch(pair, f"expected {pair.want}, received {pair.got}")
    if find_plain_name(pair.want) is not None:
        return None
    missing = pair.want.names() - sizes.keys()
    if missing:
        return (
            None
            if _solve_linear_size(pair, sizes, missing)
            else _make_mismatch(pair, f"expected {pair.want}, received {pair.got}")
        )
    try:
        (value,) = evaluate_shape((pair.want,), sizes)  # type: ignore[arg-type]
    except ShapeError as error:  # no whole number
        return _make_mismatch(pair, f"{error.message}, received {pair.got}")
    (got,) = evaluate_shape((pair.got,), {})  # a quotient may be exact by what is known now
    return None if value == got else _make_mismatch(pair, f"expected {pair.want} = {value}, received {pair.got}")


def _solve_linear_size(pair: _AxisPair, sizes: dict[str, Size], missing: frozenset[str]) -> bool:
    """Solve a linear expression for its one unknown name; False where it has no solution."""
    assert isinstance(pair.want, Dim)
    if len(missing) != 1 or any(len(m) > 1 or not all(isinstance(a, str) for a in m) for m, _ in pair.want.terms):
        return True  # more than one name, or no line: nothing is known
    (name,) = missing
    unit = math.lcm(*(count.denominator for _, count in pair.want.terms))  # of B/4: what gives a whole number
    at_zero, at_one = (pair.want.evaluate({**sizes, name: n}) for n in (0, unit))  # type: ignore[dict-item]
    rest, slope = (pair.got - at_zero) * unit, at_one - at_zero
    if slope == 0 or isinstance(rest, Dim) and rest % slope != 0:
        return True
    if rest % slope != 0 or (isinstance(rest // slope, int) and rest // slope < 0):  # type: ignore[operator]
        return False
    sizes[name] = rest // slope
    return True


def _make_mismatch(pair: _AxisPair, problem: str) -> ShapeMismatch:
    return ShapeMismatch(pair.number, f"axis {pair.axis}: {problem}")


def find_plain_name(size: Size) -> str | None:
    """The name of a dim that is a single name, or None."""
    if isinstance(size, Dim) and len(size.terms) == 1:
        (monomial, count) = size.terms[0]
        if count == 1 and len(monomial) == 1 and isinstance(monomial[0], str):
            return monomial[0]
    return None


# Sizes parsed from names, expressions and type variables.


_BINARY_MULTIPLE = re.compile(r"(\d+)([KMGT])")

_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: lambda size, number: size.divide_exactly(number) if isinstance(size, Dim) else size // number,
}


def as_size(value: int | str | Dim | TypeVar) -> Size:
    """A size from an int, a name, an expression such as "2*D+1" or a type variable (`def f[B](...)`).

    "4K", "1M", "2G" and "1T" are powers of 1024.

    >>> as_size("2*D") // 2, as_size("1M")
    (D, 1048576)
    """
    if isinstance(value, str):
        return _parse_size(value)
    if isinstance(value, TypeVar):
        return Dim.of(value.__name__)
    if isinstance(value, Dim):
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise ShapeError(
            f"{value!r} is not a dimension", location=user_location(), expected='4, "B", "2*D+1"'
        ) from None


def _parse_size(text: str) -> Size:
    if text.startswith("?") or text == "...":
        return Dim.of(text)
    if found := _BINARY_MULTIPLE.fullmatch(text.strip()):
        return int(found[1]) * 1024 ** (1 + "KMGT".index(found[2]))
    try:
        return size_from_ast(ast.parse(text.strip(), mode="eval").body, text)
    except SyntaxError:
        hint = 'write a name or arithmetic: "B", "2*D+1"'
        raise ShapeError(f'"{text}" is not a dimension', suggestion=hint) from None


def size_from_ast(node: ast.expr, text: str) -> Size:
    """The size of a Python expression; `text` is its source."""
    if isinstance(node, ast.Name):
        return Dim.of(node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -size_from_ast(node.operand, text)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and _divides_by_number(node):
        return _OPERATORS[type(node.op)](size_from_ast(node.left, text), size_from_ast(node.right, text))
    raise ShapeError(f'"{text}" is not a dimension', suggestion="use names, integers and + - * // %")


def _divides_by_number(node: ast.BinOp) -> bool:
    """Whether an exact quotient (`B/4`, or `3*B/4`) is one of names by a number; of other operators, True."""
    number = node.right.value if isinstance(node.right, ast.Constant) else 0
    named = any(isinstance(n, ast.Name) for n in ast.walk(node.left))
    return not isinstance(node.op, ast.Div) or (isinstance(number, int) and number > 0 and named)


def size_to_number(value: Any) -> int:
    """A size as a number that becomes an element of a tensor; where only types are traced, any number does.

    Raises:
        UnknownSizeError: nobody knows it.
    """
    size = resolve_size(as_size(value))
    return 1 if isinstance(size, Dim) and ABSTRACT_TRACE.get() else int(size)


# Constraints on sizes: `require("D % 8 == 0")`; and named sizes: `dims("B S D")`.


F = TypeVar("F")
_COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_SIGNS = {
    compare: sign for sign, compare in zip(("==", "!=", "<", "<=", ">", ">="), _COMPARISONS.values(), strict=True)
}
# The constraints that a function states while it is traced; None where nobody asks.
STATED_CONSTRAINTS: ContextVar[list[SizeConstraint] | None] = ContextVar("stated constraints", default=None)
_CONSTRAINTS_IN_USE: ContextVar[tuple[SizeConstraint, ...]] = ContextVar("constraints in use", default=())


@contextmanager
def note_stated_constraints(known: Iterable[SizeConstraint] = ()) -> Iterator[list[SizeConstraint]]:
    """Note the constraints that a function states (`require` as a statement) while it is traced.

    What is `known` of its sizes holds besides what the caller knows.
    """
    stated: list[SizeConstraint] = []
    token = STATED_CONSTRAINTS.set(stated)
    try:
        with use_size_constraints((*_CONSTRAINTS_IN_USE.get(), *known)):
            yield stated
    finally:
        STATED_CONSTRAINTS.reset(token)


def dims(names: str) -> tuple[Dim, ...]:
    """Named sizes, for annotations.

    >>> B, D = dims("B D")
    >>> 2 * B * D
    2*B*D
    """
    return tuple(Dim.of(name) for name in names.replace(",", " ").split())


class SizeConstraint:
    """A constraint on sizes: a decorator of the function whose annotations name them."""

    def __init__(self, text: str, place: Location | str = "") -> None:
        self.text, self.place = text, str(place)
        self.clauses = _parse_relations(text)
        self.names = frozenset(n for left, _, right in self.clauses for n in _size_names(left) | _size_names(right))

    def __call__(self, function: F) -> F:
        function.__requires__ = (*getattr(function, "__requires__", ()), self)  # type: ignore[attr-defined]
        return function

    def holds(self, sizes: Mapping[str, Size]) -> bool | None:
        """Whether the sizes satisfy it; None where that is undecidable."""
        found = [_decide_relation(left, compare, right, sizes) for left, compare, right in self.clauses]
        if False in found:
            return False
        return None if None in found else True

    def check(self, sizes: Mapping[str, Size]) -> None:
        """Raise a ShapeError where the sizes violate it."""
        if self.holds(sizes) is False:
            known = ", ".join(f"{n} = {sizes[n]}" for n in sorted(self.names))
            stated = f"{self.text}, as {self.place} has it" if self.place else self.text
            raise ShapeError(f"{self.text} does not hold", expected=stated, received=known)

    def substitute(self, sizes: Mapping[str, Size]) -> SizeConstraint | None:
        """The constraint with the names in `sizes` replaced; None where no name is left.

        >>> SizeConstraint("B * D <= 64").substitute({"B": Dim.of("N"), "D": 8}).text
        '8*N <= 64'
        """
        if all(sizes.get(n, Dim.of(n)) == Dim.of(n) for n in self.names):
            return self if self.names else None
        parts = []
        for left, compare, right in self.clauses:
            a, b = evaluate_shape((left, right), sizes)  # type: ignore[arg-type]
            if symbol_names((a, b)):
                parts.append(format_relation(a, _SIGNS[compare], b))
        return SizeConstraint(" and ".join(parts), self.place) if parts else None


def format_relation(left: Size, sign: str, right: Size) -> str:
    """A comparison of sizes as a constraint says it.

    >>> format_relation(Dim.of("B") % 2, "!=", 0), format_relation(4 * (Dim.of("B") // 8), "<", Dim.of("S"))
    ('B % 2 != 0', '4*(B // 8) < S')
    """
    sides = (_DIVISION.sub(r"(\1 \2 \3)", str(side)) for side in (left, right))
    a, b = (_WHOLE_DIVISION.sub(r"\1", side) for side in sides)
    return f"{a} {sign} {b}"


_DIVISION = re.compile(r"\(\((\w+)\) (//|%) \((\w+)\)\)")
_WHOLE_DIVISION = re.compile(r"^\((\w+ (?://|%) \w+)\)$")


def require(text: str) -> SizeConstraint:
    """Require a relation of sizes: as a decorator of a function, or as a statement in it.

    Shapes: the names are those of the function's annotations. A size that is still symbolic is taken to fulfil it.

    Raises:
        ShapeError: sizes that are known do not fulfil it, or `text` is no comparison.

    >>> require("D % 8 == 0").holds({"D": 768})
    True
    """
    place = user_location()
    requirement = SizeConstraint(text, "" if place == UNKNOWN else place)
    sizes = KNOWN_SIZES.get()
    if sizes is not None:
        if (stated := STATED_CONSTRAINTS.get()) is not None:
            stated.append(requirement)
        try:
            requirement.check(sizes)
        except ShapeError as error:
            raise error.at(user_location()) from None
        if stated is not None and (found := requirement.substitute(sizes)) is not None:
            _set_constraints((*_CONSTRAINTS_IN_USE.get(), found))  # for the lines that follow
    return requirement


@contextmanager
def use_size_constraints(stated: Iterable[SizeConstraint]) -> Iterator[None]:
    """Use what constraints state: tiles that divide the 64 of `S % 64 == 0` need no masks; no size is out of bounds."""
    tokens = _set_constraints(tuple(stated))
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def _set_constraints(constraints: tuple[SizeConstraint, ...]) -> list[tuple[ContextVar[Any], Token[Any]]]:
    """Set what is known of sizes to what these constraints state; how to reset it."""
    divisors: dict[str, int] = {}
    for clause in (c for constraint in constraints for c in constraint.clauses):
        left, compare, right = clause
        if compare is operator.eq and (found := find_stated_divisor(left, right)) is not None:
            name, number = found
            divisors[name] = math.lcm(number, divisors.get(name, 1))
    minima = {name: round_up(least, divisors.get(name, 1)) for name, least in _find_stated_minima(constraints).items()}
    facts: tuple[tuple[ContextVar[Any], Any], ...] = (
        (_CONSTRAINTS_IN_USE, constraints),
        (SIZE_DIVISORS, divisors),
        (SIZE_LIMITS, _find_stated_limits(constraints)),
        (SIZE_MINIMA, divisors | minima),
    )
    return [(variable, variable.set(value)) for variable, value in facts]


def _order_relation(left: Size, compare: Callable[[Any, Any], bool], right: Size) -> tuple[Size, Size, bool] | None:
    """A comparison as the lesser side, the greater one, and whether they may not be equal; None for other relations."""
    if compare in (operator.gt, operator.ge):
        return right, left, compare is operator.gt
    return (left, right, compare is operator.lt) if compare in (operator.lt, operator.le) else None


def _find_stated_minima(constraints: Sequence[SizeConstraint]) -> dict[str, int]:
    """The least value of a name that a constraint such as `S >= 2` or `1 < S` states."""
    minima: dict[str, int] = {}
    for clause in (c for constraint in constraints for c in constraint.clauses):
        lesser, greater, strict = _order_relation(*clause) or (None, 0, False)
        name = find_plain_name(greater)
        if isinstance(lesser, int) and name is not None:
            minima[name] = max(lesser + strict, minima.get(name, LEAST_SIZE))
    return minima


def _find_stated_limits(constraints: Sequence[SizeConstraint]) -> dict[tuple[str, ...], int]:
    """The greatest value of a name or product that a constraint such as `S <= 16` or `B*S < 64` allows."""
    limits: dict[tuple[str, ...], int] = {}
    for clause in (c for constraint in constraints for c in constraint.clauses):
        lesser, greater, strict = _order_relation(*clause) or (None, None, False)
        if not isinstance(lesser, Dim) or not isinstance(greater, int):
            continue
        ((monomial, count), *others) = lesser.terms
        if others or count <= 0 or not all(isinstance(a, str) for a in monomial):
            continue
        most = int((greater - strict) // count)
        for names in (monomial, *((name,) for name in monomial)):  # no factor is 0
            limits[names] = min(most, limits.get(names, most))
    return limits


def find_stated_values(constraints: Iterable[SizeConstraint]) -> dict[str, int]:
    """The names whose value a constraint such as `B == 1` states.

    >>> find_stated_values([SizeConstraint("B == 1 and S <= 8")])
    {'B': 1}
    """
    clauses = (clause for constraint in constraints for clause in constraint.clauses)
    pairs = ((find_plain_name(left), right) for left, compare, right in clauses if compare is operator.eq)
    return {name: value for name, value in pairs if name is not None and isinstance(value, int)}


def bind_program_sizes(
    names: Sequence[str],
    patterns: Sequence[ShapePattern],
    shapes: Sequence[ShapePattern],
    constraints: Iterable[SizeConstraint],
) -> dict[str, Any]:
    """The symbolic sizes of a program for the shapes of its arguments, whose names are for the errors.

    Raises:
        ShapeError: a shape does not fit, an axis is empty, or a size breaks a constraint.
    """
    sizes: dict[str, Any] = {}
    constraints = list(constraints)
    if misfit := bind_shapes(list(zip(patterns, shapes, strict=True)), sizes):
        for constraint in constraints:  # one that is broken says more: B/4 needs a multiple of 4
            constraint.check(sizes)
        at = misfit.number
        raise ShapeError(
            f"argument {names[at]}: {misfit.problem}", expected=format_shape(patterns[at]),
            received=format_shape(shapes[at]),
        )  # fmt: skip
    empty = next((n for n, value in sizes.items() if value < LEAST_SIZE), None)
    if empty is not None:
        raise ShapeError(
            f"the size {empty} is {sizes[empty]}", expected=f"at least {LEAST_SIZE}", received=str(sizes[empty]),
            suggestion="a program of symbolic sizes takes no empty axes",
        )  # fmt: skip
    for constraint in constraints:
        constraint.check(sizes)
    return sizes


def find_size_constraints(function: Any) -> tuple[SizeConstraint, ...]:
    """The constraints that decorators put on the sizes of a function's annotations."""
    return getattr(function, "__requires__", ())


@contextmanager
def use_known_sizes(sizes: Mapping[str, Size]) -> Iterator[None]:
    """Make these sizes known to `require` inside the context."""
    token = KNOWN_SIZES.set(sizes)
    try:
        yield
    finally:
        KNOWN_SIZES.reset(token)


def _size_names(size: Size) -> frozenset[str]:
    return size.names() if isinstance(size, Dim) else frozenset()


def _decide_relation(
    left: Size, compare: Callable[[Any, Any], bool], right: Size, sizes: Mapping[str, Size]
) -> bool | None:
    if not (_size_names(left) | _size_names(right)) <= sizes.keys():
        return None
    a, b = (s.evaluate(sizes) if isinstance(s, Dim) else s for s in (left, right))  # type: ignore[arg-type]
    gap = a - b
    return compare(gap, 0) if isinstance(gap, int) else None


def _parse_relations(text: str) -> list[tuple[Size, Callable[[Any, Any], bool], Size]]:
    hint = 'write a comparison of sizes: "D % 8 == 0"'
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ShapeError(f'"{text}" is not a constraint', suggestion=hint) from None
    parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    clauses = []
    for part in parts:
        if not isinstance(part, ast.Compare) or any(type(o) not in _COMPARISONS for o in part.ops):
            raise ShapeError(f'"{text}" is not a constraint', suggestion=hint)
        sides = [size_from_ast(s, text) for s in (part.left, *part.comparators)]
        clauses += [(sides[i], _COMPARISONS[type(o)], sides[i + 1]) for i, o in enumerate(part.ops)]
    return clauses


# Shape rules of many ops: broadcasting and axes.


def broadcast(*shapes: Sequence[Size]) -> tuple[Size, ...]:
    """The shape that NumPy broadcasting gives; symbolic sizes agree only with themselves and 1.

    >>> broadcast((8, 1, 6), (7, 1))
    (8, 7, 6)
    """
    rank = max((len(s) for s in shapes), default=0)
    out: list[Size] = [1] * rank
    for shape in shapes:
        for back, size in enumerate(reversed(shape), start=1):
            if out[-back] == 1:
                out[-back] = size
            elif size != 1 and size != out[-back]:
                raise ShapeError(
                    f"cannot broadcast {_name_size(out[-back])} with {_name_size(size)} in dimension {rank - back}",
                    expected=f"sizes that are equal or 1 in dimension {rank - back}",
                    received=" and ".join(format_shape(s) for s in shapes),
                )
    return tuple(out)


def _name_size(size: Size) -> str:
    """A size with the only name that the annotations of the traced function have for it: "S = 3"."""
    names = [name for name, known in (KNOWN_SIZES.get() or {}).items() if known == size and name.isidentifier()]
    return f"{names[0]} = {size}" if len(names) == 1 and names[0] != str(size) else str(size)


def format_shape(shape: Sequence[Size]) -> str:
    """A shape as text: (8, D)."""
    return "(" + ", ".join(str(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"


def normalize_axis(axis: int, rank: int) -> int:
    """An axis counted from the end (negative), so that leading batch axes do not move it."""
    if axis.__class__ is not int:
        axis = _axis_index(axis)
    if not -rank <= axis < rank:
        raise ShapeError(
            f"axis {axis} is out of range for a tensor of rank {rank}",
            expected=f"an axis from {-rank} to {rank - 1}" if rank else "no axis: the tensor is a scalar",
            received=str(axis),
        )
    return axis - rank if axis >= 0 else axis


def _axis_index(axis: Any) -> int:
    """Convert an axis to an int."""
    try:
        if not isinstance(axis, bool):
            return operator.index(axis)
    except TypeError:
        pass
    raise ArgumentError("this is no axis", expected="an integer", received=f"{type(axis).__name__} {axis!r}")


def normalize_axes(axes: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Sorted negative axes; None means all of them."""
    if axes is None:
        return tuple(range(-rank, 0))
    listed: list[Any] = list(axes) if isinstance(axes, (list, tuple)) else [axes]
    found = sorted(normalize_axis(a, rank) for a in listed)
    if len(set(found)) != len(found):
        raise ShapeError(f"an axis is named twice: {tuple(listed)}")
    return tuple(found)


# Symbolic dimensions and the shape algebra over them.


__all__ = [
    "Dim",
    "Size",
    "UnknownSizeError",
    "as_size",
    "bind_shape",
    "bind_shapes",
    "broadcast",
    "dims",
    "evaluate_shape",
    "normalize_axes",
    "normalize_axis",
    "require",
    "symbol_names",
]
