"""Size variants: several programs for the symbolic sizes of one artifact, each chosen by what holds of the sizes.

A variant is asked for (`S % 64 == 0`: whole tiles; `B == 1`: a program for this size), or serves the sizes that a
comparison in the Python code or in a kernel keeps from the general program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.core.shapes import SizeConstraint, bind_shapes
from tessera.core.symbolic_dim import Dim
from tessera.frontend.jit.dynamic_shapes import SizeVariant
from tessera.runtime.program import PreparedProgram

MAX_VARIANTS = 8  # of one artifact, beside the general program
MAX_ATTEMPTS = 8  # traces for sizes that comparisons keep from the programs so far
MAX_CANDIDATES = 40_000  # sets of sizes that are looked through for one that fulfils constraints
TYPICAL_SIZES = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

PrepareVariant = Callable[[SizeVariant | None], PreparedProgram]
Sizes = Mapping[str, int]


def prepare_variants(prepare: PrepareVariant, wanted: Sequence[str]) -> tuple[PreparedProgram, list[PreparedProgram]]:
    """The general program for all sizes, and its variants in the order in which a call tries them.

    `prepare(variant)` makes one of them; `wanted` are constraints such as "S % 64 == 0".

    Raises:
        ArgumentError: a constraint names no size of the program, or no sizes fulfil it; there are too many.
    """
    general = prepare(None)
    example = find_example_sizes(general)
    texts = [wanted] if isinstance(wanted, str) else list(wanted)
    if texts and not example:
        raise ArgumentError(
            "variants are for symbolic sizes", location=user_location(), expected="dynamic=", received=repr(wanted)
        )
    if len(texts) > MAX_VARIANTS:
        raise ArgumentError(
            f"{len(texts)} variants were asked for", location=user_location(), expected=f"at most {MAX_VARIANTS}"
        )
    made = [prepare(_plan_wanted(text, general, example)) for text in texts]
    return general, made + _serve_excluded_sizes(prepare, general, made, example)


def find_example_sizes(program: PreparedProgram) -> dict[str, int]:
    """The sizes of the arguments that a program was built with."""
    sizes: dict[str, Any] = {}
    params = program.levels["tile"].main.params
    bind_shapes([(p.type.shape, np.shape(a)) for p, a in zip(params, program.arrays, strict=False)], sizes)
    return sizes


def _plan_wanted(text: Any, general: PreparedProgram, example: Sizes) -> SizeVariant:
    if not isinstance(text, str):
        raise ArgumentError(
            f"{text!r} is not a variant", location=user_location(), expected='a constraint such as "S % 64 == 0"'
        )
    constraint = SizeConstraint(text)
    if unknown := sorted(constraint.names - example.keys()):
        raise ArgumentError(
            f"the variant {text!r} names no symbolic size", location=user_location(),
            expected=", ".join(sorted(example)), received=", ".join(unknown),
        )  # fmt: skip
    needed = [constraint, *general.rules.constraints]
    sizes = next((s for s in iterate_sizes(needed, example) if _fulfil(needed, s)), None)
    if sizes is None:
        raise ArgumentError(
            f"no sizes fulfil the variant {text!r}", location=user_location(),
            expected=" and ".join(c.text for c in needed), suggestion="name sizes that calls have",
        )  # fmt: skip
    return SizeVariant((constraint,), sizes)


def _serve_excluded_sizes(
    prepare: PrepareVariant, general: PreparedProgram, made: Sequence[PreparedProgram], example: Sizes
) -> list[PreparedProgram]:
    """Programs for the sizes that guards keep from the others; where the code fails for them, there is none."""
    found: list[PreparedProgram] = []
    tried: set[frozenset[str]] = set()
    while len(made) + len(found) < MAX_VARIANTS and len(tried) < MAX_ATTEMPTS:
        programs = [general, *made, *found]
        variant = _find_excluded(programs, example, tried)
        if variant is None:
            break
        try:
            found.append(prepare(variant))
        except Exception:  # also the user's own code: these sizes stay outside the constraints
            continue
    return found


def _find_excluded(programs: Sequence[PreparedProgram], example: Sizes, tried: set[frozenset[str]]) -> Any:
    """A variant for sizes that no program serves, and whose broken guards were not tried; None where there is none."""
    conditions = [p.conditions for p in programs]
    required = programs[0].rules.constraints
    guards = [g for p in programs for g in p.rules.guards]
    for sizes in iterate_sizes([*required, *guards], example):
        if not _fulfil(required, sizes) or any(_fulfil(c, sizes) for c in conditions):
            continue
        broken = frozenset(g.text for g in guards if g.holds(sizes) is False)
        if broken and broken not in tried:
            tried.add(broken)
            return SizeVariant(_find_points(programs[0].rules.guards, sizes), sizes)
    return None


def _find_points(guards: Sequence[SizeConstraint], sizes: Sizes) -> tuple[SizeConstraint, ...]:
    """For single sizes that a guard leaves out (`B != 16`) the constraint that they have."""
    broken = [g for g in guards if g.holds(sizes) is False]
    texts = [g.text.replace("!=", "==") for g in broken if "!=" in g.text and "%" not in g.text and "//" not in g.text]
    return tuple(SizeConstraint(text) for text in texts)


def _fulfil(constraints: Sequence[SizeConstraint], sizes: Sizes) -> bool:
    return all(c.holds(sizes) is not False for c in constraints)


def iterate_sizes(constraints: Sequence[SizeConstraint], example: Sizes) -> Iterator[dict[str, int]]:
    """Sets of sizes at which constraints may change, those near the example first."""
    numbers = sorted({abs(n) for c in constraints for n in _list_numbers(c)})
    columns = [_list_candidates(value, numbers) for value in example.values()]
    most = max(1, int(MAX_CANDIDATES ** (1 / max(len(columns), 1))))
    sets = itertools.product(*(column[:most] for column in columns))
    near = sorted(sets, key=lambda s: sum(abs(math.log2(a / b)) for a, b in zip(s, example.values(), strict=True)))
    return (dict(zip(example, each, strict=True)) for each in near)


def _list_candidates(value: int, numbers: Sequence[int]) -> list[int]:
    """Values of a size, the nearest first: the example's, typical ones, and those beside the numbers of constraints."""
    found = {value, *TYPICAL_SIZES}
    for number in numbers:
        multiple = value // number * number if number else 0
        found |= {number - 1, number, number + 1, 2 * number, multiple, multiple + number, multiple + 1}
    return sorted((n for n in found if n >= 1), key=lambda n: (abs(math.log2(n / value)), n))


def _list_numbers(constraint: SizeConstraint) -> Iterator[int]:
    """The numbers in a constraint, and the quotients of its sides' constants and factors."""
    for left, _, right in constraint.clauses:
        gap = left - right
        terms = gap.terms if isinstance(gap, Dim) else ()
        constant = sum(int(count) for monomial, count in terms if not monomial)
        for monomial, count in terms:
            yield from (count.numerator, count.denominator, int(constant // count))
            for atom in monomial:
                if not isinstance(atom, str):
                    yield from (n for n in atom[1:] if isinstance(n, int))
                    yield from (n * abs(constant or 1) for n in atom[1:] if isinstance(n, int))
