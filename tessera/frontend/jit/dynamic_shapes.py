"""Dynamic shapes: one compiled program for all sizes of the axes whose size changes from call to call.

As in `torch.compile`, axes become symbolic when a second size of them is seen (automatic dynamic shapes), and axes that
had the same sizes in all calls share a symbol (duck shaping). A trace notes which sizes it took to be different
(guards); a call that breaks one, or has an axis of size 0, is compiled for its own sizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.errors import UNKNOWN, ArgumentError, Location, ShapeError, user_location
from tessera.core.shapes import (
    ShapePattern,
    SizeConstraint,
    as_size,
    bind_shapes,
    find_stated_values,
    format_relation,
    normalize_axis,
    use_size_constraints,
)
from tessera.core.size_guards import find_broken_guards, holds_for, is_point
from tessera.core.symbolic_dim import (
    ANY_DIMS,
    SIZE_ESTIMATES,
    SIZE_GUARDS,
    Dim,
    Size,
    SizeGuard,
    SizeGuards,
    evaluate_shape,
    symbol_names,
)
from tessera.core.types import TensorType
from tessera.ir.core import Function

if TYPE_CHECKING:
    import logging

Shapes = tuple[tuple[Size, ...], ...]  # of the arguments of a call: numbers

MAX_SYMBOLIC_PROGRAMS = 8  # of one function and kinds of arguments; then calls are compiled for their own sizes


@cache
def find_compile_log() -> logging.Logger:
    """The log of compilations, which goes to standard error where the environment has `TESSERA_LOG=compile`."""
    import logging  # late: it takes 4 ms of `import tessera`

    log = logging.getLogger("tessera.compile")
    if "compile" in os.environ.get("TESSERA_LOG", "").split(",") and not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
    return log


@dataclass(frozen=True)
class SizeVariant:
    """One of several programs of an artifact: for sizes that fulfil its own constraints, and those of the function.

    `sizes` is an example of them, which decides comparisons and the choice of tiles.
    """

    constraints: tuple[SizeConstraint, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    def fix(self, patterns: Iterable[ShapePattern]) -> tuple[ShapePattern, ...]:
        """The shapes with the sizes that its constraints state as numbers (`B == 1`)."""
        values = find_stated_values(self.constraints)
        return tuple(evaluate_shape(p, values) for p in patterns)


@dataclass(frozen=True)
class SizeRules:
    """What a program requires of its symbolic sizes: constraints, each with the line that states it."""

    constraints: tuple[SizeConstraint, ...] = ()
    guards: tuple[SizeConstraint, ...] = ()

    @staticmethod
    def of(constraints: Iterable[SizeConstraint], sizes: Mapping[str, Size]) -> SizeRules:
        """The constraints of a function, whose annotations' names stand for these sizes; equal ones count once.

        Raises:
            ShapeError: a number breaks one.
        """
        kept: dict[str, SizeConstraint] = {}
        for constraint in constraints:
            constraint.check(sizes)
            if (found := constraint.substitute(sizes)) is not None:
                kept.setdefault(found.text, found)
        return SizeRules(tuple(kept.values()))

    def add_constraints(self, others: SizeRules) -> SizeRules:
        """These rules and the constraints of others."""
        held = set(self.texts)
        return replace(self, constraints=(*self.constraints, *(c for c in others.constraints if c.text not in held)))

    def add_guards(self, noted: Mapping[SizeGuard, Location]) -> SizeRules:
        """These rules, and what a trace took to hold of the sizes."""
        texts = {format_relation(a, sign, b): place for (a, sign, b), place in noted.items()}
        guards = (SizeConstraint(text, "" if texts[text] == UNKNOWN else texts[text]) for text in sorted(texts))
        held = set(self.texts)
        return SizeRules(self.constraints, tuple(g for g in guards if g.text not in held))

    @property
    def texts(self) -> tuple[str, ...]:
        """The constraints and the guards as text."""
        return tuple(c.text for c in (*self.constraints, *self.guards))


@dataclass(frozen=True)
class SymbolicProgram:
    """A compiled program of symbolic sizes: what is known of them, and the trace and its executable."""

    patterns: tuple[ShapePattern, ...]
    guards: SizeGuards
    traced: Any
    run: Callable[..., Any]
    rules: SizeRules

    def fits(self, shapes: Shapes) -> bool:
        """Whether a call with these shapes may run it."""
        sizes = self.bind(shapes)
        return sizes is not None and 0 not in sizes.values() and self._keeps(sizes) and holds_for(self.guards, sizes)

    def _keeps(self, sizes: Mapping[str, int]) -> bool:
        """Whether these sizes fulfil what the function states (`ts.require`); a trace for others raises the error."""
        return all(c.holds(sizes) is not False for c in self.rules.constraints)

    def excludes(self, shapes: Shapes) -> bool:
        """Whether these sizes match, and are single ones that a program of symbolic sizes leaves out."""
        sizes = self.bind(shapes)
        return sizes is not None and (
            not self._keeps(sizes) or any(map(is_point, find_broken_guards(self.guards, sizes)))
        )

    def bind(self, shapes: Shapes) -> dict[str, int] | None:
        """The sizes of the names for these shapes; None where a shape does not match."""
        sizes: dict[str, Any] = {}
        return sizes if bind_shapes(list(zip(self.patterns, shapes, strict=True)), sizes) is None else None


@dataclass
class CallHistory:
    """The shapes of the calls of one function with one kind of arguments, and its programs of symbolic sizes."""

    shapes: list[Shapes] = field(default_factory=list)
    programs: list[SymbolicProgram] = field(default_factory=list)
    gave_up: bool = False

    def find(self, shapes: Shapes) -> SymbolicProgram | None:
        """A program that serves these shapes."""
        return next((p for p in self.programs if p.fits(shapes)), None)

    def wants_symbols(self, shapes: Shapes) -> bool:
        """Whether a second size of an axis is seen, in calls that could share a program."""
        if self.gave_up or len(self.programs) >= MAX_SYMBOLIC_PROGRAMS or any(0 in s for s in shapes):
            return False
        if any(p.excludes(shapes) for p in self.programs):
            return False  # a guard fails, which it would in another program too
        return bool(self.programs) or any(other != shapes for other in self.shapes)


def make_patterns(
    seen: Sequence[Shapes], annotated: Sequence[TensorType | None], always: bool = False
) -> tuple[ShapePattern, ...]:
    """The shapes of all calls as one: an axis whose size differs between calls is symbolic.

    Annotated axes keep their names. With `always` a named axis is symbolic though its size has not changed, and where
    nothing is annotated, every axis of more than one element is.
    """
    named = _bind_names(seen, annotated)
    fixed = {} if always and named else {n: values[0] for n, values in named.items() if len(set(values)) == 1}
    every = always and not named
    symbols: dict[tuple[Size, ...], Dim] = {}
    patterns = []
    for leaf, want in enumerate(annotated):
        rank = len(seen[0][leaf])
        if want is not None and ANY_DIMS not in want.shape and len(want.shape) == rank:
            known = evaluate_shape(want.shape, fixed)
            patterns.append(tuple(_own_size(known, seen, leaf, axis, symbols, every) for axis in range(rank)))
        else:
            sizes = [tuple(call[leaf][axis] for call in seen) for axis in range(rank)]
            patterns.append(tuple(_make_symbol(column, symbols, every) for column in sizes))
    return tuple(patterns)


def _own_size(
    known: ShapePattern, seen: Sequence[Shapes], leaf: int, axis: int, symbols: dict[tuple[Size, ...], Dim], every: bool
) -> Size:
    size = known[axis]
    if isinstance(size, Dim) and any(n.startswith("?") for n in size.names()):
        return _make_symbol(tuple(call[leaf][axis] for call in seen), symbols, every)
    return size


def _bind_names(seen: Sequence[Shapes], annotated: Sequence[TensorType | None]) -> dict[str, list[int]]:
    """The values of the annotations' names in each call."""
    found: dict[str, list[int]] = {}
    for call in seen:
        sizes: dict[str, Any] = {}
        bind_shapes([(w.shape, s) for w, s in zip(annotated, call, strict=True) if w is not None], sizes)
        for name, value in sizes.items():
            if not name.startswith("?"):
                found.setdefault(name, []).append(value)
    return found


def _make_symbol(column: tuple[Size, ...], symbols: dict[tuple[Size, ...], Dim], every: bool) -> Size:
    """The symbol of an axis with these sizes in the calls so far; a number where it is always the same."""
    if len(set(column)) == 1 and not (every and column[0] > 1):
        return column[0]
    return symbols.setdefault(column, Dim.of(f"s{len(symbols)}"))


def name_axes(
    names: Sequence[str], shapes: Shapes, annotated: Sequence[TensorType | None], dynamic: Any
) -> tuple[ShapePattern, ...]:
    """The shapes of a program with the symbolic axes that its builder names.

    `dynamic` is True for the sizes that annotations name, or maps arguments to `{axis: size}`, where a size is a name
    or an expression of names ("B", "2*B").

    Raises:
        ArgumentError: there is no such argument or axis, or nothing is named.
        ShapeError: the sizes of the example do not fit the names.
    """
    if dynamic is True:
        patterns = make_patterns([shapes], annotated, always=True)
    elif isinstance(dynamic, Mapping):
        patterns = _name_listed_axes(names, shapes, dynamic)
    else:
        raise _make_dynamic_error("dynamic is neither True nor a mapping", dynamic)
    if not has_symbols(patterns):
        raise _make_dynamic_error("no size is named", dynamic)
    sizes: dict[str, Any] = {}
    misfit = bind_shapes(list(zip(patterns, shapes, strict=True)), sizes)
    names_of = sorted({n for p in patterns for n in symbol_names(p)})
    if unnamed := [n for n in names_of if not n.isidentifier()]:
        raise _make_dynamic_error(f"{unnamed[0]!r} is no name of a size", dynamic)
    if misfit is None and (unsolved := [n for n in names_of if n not in sizes]):
        raise _make_dynamic_error(f"no axis says what the size {unsolved[0]} is", dynamic)
    if misfit:
        raise ShapeError(
            f"the example of {names[misfit.number]} does not fit its symbolic sizes: {misfit.problem}",
            location=user_location(), expected=str(patterns[misfit.number]), received=str(shapes[misfit.number]),
        )  # fmt: skip
    return patterns


def _make_dynamic_error(problem: str, dynamic: Any) -> ArgumentError:
    return ArgumentError(
        problem, location=user_location(), expected='{"x": {0: "B"}}, or True and annotations such as Tensor["B", 4]',
        received=repr(dynamic),
    )  # fmt: skip


def _name_listed_axes(
    names: Sequence[str], shapes: Shapes, dynamic: Mapping[str, Mapping[int, Any]]
) -> tuple[ShapePattern, ...]:
    patterns: list[list[Size]] = [list(s) for s in shapes]
    for name, axes in dynamic.items():
        if name not in names or not isinstance(axes, Mapping):
            raise ArgumentError(
                f"there is no array {name!r} with symbolic axes", location=user_location(),
                expected=", ".join(names), received=repr({name: axes}),
            )  # fmt: skip
        pattern = patterns[names.index(name)]
        for axis, size in axes.items():
            pattern[normalize_axis(axis, len(pattern))] = as_size(size)
    return tuple(tuple(p) for p in patterns)


@contextmanager
def trace_symbols(
    patterns: Sequence[ShapePattern], shapes: Shapes, example: Mapping[str, int] | None = None
) -> Iterator[dict[SizeGuard, Location]]:
    """Note what is taken to hold of the sizes (guards); tiles are chosen for the sizes of this call, or an example."""
    sizes: dict[str, Any] = {**(example or {})}
    if example is None:
        bind_shapes(list(zip(patterns, shapes, strict=True)), sizes)
    noted: dict[SizeGuard, Location] = {}
    tokens = SIZE_GUARDS.set(noted), SIZE_ESTIMATES.set(sizes)
    try:
        yield noted
    finally:
        SIZE_GUARDS.reset(tokens[0])
        SIZE_ESTIMATES.reset(tokens[1])


@contextmanager
def estimate_sizes(
    function: Function, arrays: Sequence[Any], example: Mapping[str, int] | None = None
) -> Iterator[None]:
    """Choose tiles for the sizes of these arguments or of an example, and for what constraints say of all sizes."""
    sizes: dict[str, Any] = {**(example or {})}
    if example is None:
        bind_shapes([(p.type.shape, np.shape(a)) for p, a in zip(function.params, arrays, strict=True)], sizes)
    token = SIZE_ESTIMATES.set(sizes)
    try:
        with use_size_constraints(SizeConstraint(text) for text in function.attrs.get("constraints", ())):
            yield
    finally:
        SIZE_ESTIMATES.reset(token)


def has_symbols(patterns: Sequence[ShapePattern]) -> bool:
    """Whether any size is symbolic."""
    return any(symbol_names(p) for p in patterns)


def check_tuning(tune: Any, dynamic: bool | None) -> None:
    """Check that a function can be tuned: a schedule is chosen for known sizes.

    Raises:
        ArgumentError: `tune` is not a bool, or symbolic sizes are asked for, too.
    """
    if not isinstance(tune, bool):
        raise ArgumentError(
            "tune says whether schedules are measured", location=user_location(), expected="a bool", received=repr(tune)
        )
    if tune and dynamic:
        raise ArgumentError(
            "a schedule is tuned for known sizes", location=user_location(), expected="tune=True or dynamic=True",
            received="both", suggestion="dynamic=False, or no tuning",
        )  # fmt: skip
