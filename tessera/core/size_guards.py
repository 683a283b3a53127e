"""Guards: what a trace takes to hold of its symbolic sizes, decided by the sizes of the example."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

from tessera.core.symbolic_dim import (
    ABSTRACT_TRACE,
    SIZE_GUARDS,
    Dim,
    Size,
    SizeGuard,
    SizeGuards,
    estimate_size,
    evaluate_shape,
    find_needed_divisor,
    has_inexact_division,
    learn_divisor,
    note_guard,
    proves_at_most,
    proves_less,
)

_COMPARE = {"<": operator.lt, "<=": operator.le, "!=": operator.ne, "==": operator.eq}


def is_point(guard: SizeGuard) -> bool:
    """Whether a guard excludes single sizes (`B != 16`): another trace would exclude them too.

    >>> is_point((Dim.of("B"), "!=", 16)), is_point((Dim.of("B") % 2, "!=", 0))
    (True, False)
    """
    left, sign, right = guard
    return sign == "!=" and not has_inexact_division((left, right))


def assume_unequal(size: Size, other: Size) -> None:
    """Note that a program which is traced takes these sizes to be different."""
    if isinstance(size, Dim) or isinstance(other, Dim):
        note_guard((size, "!=", other))


def assume_at_most(size: Size, limit: Size) -> bool:
    """Whether a size may be taken to be at most another: it is proven, or holds for the example's sizes (a guard)."""
    guards = SIZE_GUARDS.get()
    if guards is None or proves_at_most(size, limit) or proves_less(limit, size):
        return not proves_less(limit, size)
    if estimate_size(size) > estimate_size(limit):
        return False
    note_guard((size, "<=", limit))
    return True


def assume_divisible(size: Size, number: Size) -> None:
    """Note that a program which is traced takes a size to be a multiple of a number, where the example's sizes are.

    Where types alone are traced, no size is an example: the program is right for those that are multiples.
    """
    needed = find_needed_divisor(size, number)
    if needed is None or size % number == 0:
        return
    name, least = Dim.of(needed[0]), needed[1]
    if ABSTRACT_TRACE.get():
        learn_divisor(*needed)
    elif SIZE_GUARDS.get() is not None and estimate_size(name) % least == 0:
        note_guard((name % least, "==", 0))


def suggest_divisor(size: Size, number: Size) -> str | None:
    """How to say that a size is a multiple of a number, where that is what an op needs to know."""
    needed = find_needed_divisor(size, number)
    return f'state it where it holds: ts.require("{needed[0]} % {needed[1]} == 0")' if needed else None


def list_floor_divisions(shape: Iterable[Size]) -> list[tuple[Size, Size]]:
    """The dividends and divisors whose quotients, rounded down, are in a shape.

    >>> list_floor_divisions((4, 2 * (Dim.of("B") // 4)))
    [(B, 4)]
    """
    atoms = (a for size in shape if isinstance(size, Dim) for monomial, _ in size.terms for a in monomial)
    return [(a[1], a[2]) for a in atoms if a[0] == "//"]


def holds_for(guards: SizeGuards, sizes: Mapping[str, int]) -> bool:
    """Whether all guards hold for these sizes."""
    return not find_broken_guards(guards, sizes)


def find_broken_guards(guards: SizeGuards, sizes: Mapping[str, int]) -> list[SizeGuard]:
    """The guards that do not hold for these sizes."""
    return [g for g in guards if not _COMPARE[g[1]](*evaluate_shape((g[0], g[2]), sizes))]
