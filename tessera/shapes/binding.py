"""Matching annotated shapes with the shapes that arrive: which size each name has, and what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tessera.shapes.dim import ANY_DIMS, Dim, Size, evaluate_shape

Shape = Sequence[Size]


class Misfit(NamedTuple):
    """Which pair of shapes does not fit (its place in the list), and why."""

    number: int
    problem: str


class _Pair(NamedTuple):
    number: int
    axis: int
    want: Size
    got: Size


def bind_all(pairs: Sequence[tuple[Shape, Shape]], sizes: dict[str, Size]) -> Misfit | None:
    """Match annotated shapes with real ones, adding to `sizes`; the first misfit, or None.

    Plain names are bound by their first use in any of the shapes, so an expression may come before its name; a
    name that stands only in a linear expression is solved for. "?" fits every size, "..." any number of axes.

    >>> found = {}
    >>> bind_all([((2 * Dim.of("B"),), (8,)), ((Dim.of("B"),), (4,))], found), found
    (None, {'B': 4})
    """
    axes: list[_Pair] = []
    for number, (pattern, shape) in enumerate(pairs):
        aligned = _aligned(number, pattern, shape)
        if isinstance(aligned, Misfit):
            return aligned
        axes += aligned
    for pair in axes:
        name = plain_name(pair.want)
        if name is not None and sizes.setdefault(name, pair.got) != pair.got and not name.startswith("?"):
            known = sizes[name]
            said = f"expected {name}, received" if str(known) == name else f"{name} is {known} elsewhere and"
            return _misfit(pair, f"{said} {pair.got}" + ("" if str(known) == name else " here"))
    return next((m for pair in axes if (m := _checked(pair, sizes))), None)


def bind(pattern: Shape, shape: Shape, sizes: dict[str, Size]) -> str | None:
    """Match one annotated shape with a real one, adding to `sizes`; what is wrong, or None."""
    found = bind_all([(pattern, shape)], sizes)
    return found.problem if found else None


def _aligned(number: int, pattern: Shape, shape: Shape) -> list[_Pair] | Misfit:
    """The axes of both, in pairs; those that "..." stands for are left out."""
    holes = [i for i, want in enumerate(pattern) if want == ANY_DIMS]
    at_least = len(pattern) - len(holes)
    if len(shape) < at_least or (not holes and len(shape) > at_least):
        bound = "at least " if holes else ""
        return Misfit(number, f"rank {bound}{at_least} expected, rank {len(shape)} received")
    axes = list(enumerate(shape))
    if holes:
        after = len(pattern) - holes[0] - 1
        axes = axes[: holes[0]] + axes[len(axes) - after :]
    wanted = [want for want in pattern if want != ANY_DIMS]
    return [_Pair(number, axis, want, got) for want, (axis, got) in zip(wanted, axes, strict=True)]


def _checked(pair: _Pair, sizes: dict[str, Size]) -> Misfit | None:
    """The pair where its size is not what the names bound so far make of it."""
    if not isinstance(pair.want, Dim):
        return None if pair.want == pair.got else _misfit(pair, f"expected {pair.want}, received {pair.got}")
    if plain_name(pair.want) is not None:
        return None
    missing = pair.want.names() - sizes.keys()
    if missing:
        return None if _solve(pair, sizes, missing) else _misfit(pair, f"expected {pair.want}, received {pair.got}")
    (value,) = evaluate_shape((pair.want,), sizes)  # type: ignore[arg-type]
    return None if value == pair.got else _misfit(pair, f"expected {pair.want} = {value}, received {pair.got}")


def _solve(pair: _Pair, sizes: dict[str, Size], missing: frozenset[str]) -> bool:
    """Find the one name missing in a linear expression; False where no size of it fits."""
    assert isinstance(pair.want, Dim)
    if len(missing) != 1 or any(len(m) > 1 or not all(isinstance(a, str) for a in m) for m, _ in pair.want.terms):
        return True  # more than one name, or no line: nothing is known
    (name,) = missing
    at_zero, at_one = (pair.want.evaluate({**sizes, name: n}) for n in (0, 1))  # type: ignore[dict-item]
    rest, slope = pair.got - at_zero, at_one - at_zero
    if slope == 0 or isinstance(rest, Dim) and rest % slope != 0:
        return True
    if rest % slope != 0 or (isinstance(rest // slope, int) and rest // slope < 0):  # type: ignore[operator]
        return False
    sizes[name] = rest // slope
    return True


def _misfit(pair: _Pair, problem: str) -> Misfit:
    return Misfit(pair.number, f"axis {pair.axis}: {problem}")


def plain_name(size: Size) -> str | None:
    """The name that a dim is, if it is no more than one."""
    if isinstance(size, Dim) and len(size.terms) == 1:
        (monomial, count) = size.terms[0]
        if count == 1 and len(monomial) == 1 and isinstance(monomial[0], str):
            return monomial[0]
    return None
