"""Verification of a user's pass: the function before and after it has the same type and effects, and computes the same.

Values are compared in the Graph interpreter, on arrays made from a fixed seed. Both functions have rigorous error
bounds (tessera/interp/bound.py): a result after the pass may differ from the precise one before it by the sum of the
two, as it may where a pass changes the order of a sum, and by no more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import Location, TesseraError, UnsupportedOpError, VerifyError
from tessera.core.symbolic_dim import estimate_size
from tessera.core.types import TensorType
from tessera.interp import bound
from tessera.interp import graph as graph_interpreter
from tessera.interp.bound import compare_with_bound
from tessera.ir.core import Function, find_size_names
from tessera.ir.numerics.interval_arithmetic import IntervalArray
from tessera.ir.rewrite import has_effect
from tessera.ir.verify import verify_function
from tessera.lower.lowering_plan import VALUES_CHECKED

SYMBOLIC_SIZE = 5  # what a symbolic size is while values are compared, where no estimate of it is known
MOST_ELEMENTS = 1 << 22  # of the arguments: larger programs are compared by `tessera bisect` alone
REFERENCE_ERROR = 2.0**-50  # of the reference values, relative: they are computed in f64 or wider
# Without an error rule (LAPACK), the relative error that is taken to be rounding.
UNBOUNDED_TOLERANCE = 1e-3


def checks_values(wanted: bool | None) -> bool:
    """Whether values are compared after a pass: as the context says, then the pass; else unless Python runs with -O."""
    asked = VALUES_CHECKED.get()
    if asked is not None:
        return asked
    return wanted if wanted is not None else not sys.flags.optimize


def verify_pass(name: str, before: Function, after: Function, location: Location, values: bool) -> Function:
    """The function after a pass, if it is equivalent to the one before.

    Raises:
        VerifyError: the pass gives a function that is not valid, of another type or effect, or that computes something
            else; the error names the pass, the first result that differs, and the arguments' seed.
    """
    try:
        verify_function(after)
    except TesseraError as error:
        raise VerifyError(
            f"the compiler pass {name} gives a function that is not valid: {error.message}", location=location,
            expected=error.expected, received=error.received,
        ) from error  # fmt: skip
    _check_signature(name, before, after, location)
    if values and after is not before and after != before:
        _check_values(name, before, after, location)
    return after


def _check_signature(name: str, before: Function, after: Function, location: Location) -> None:
    def types(function: Function) -> str:
        params, results = (", ".join(str(v.type) for v in each) for each in (function.params, function.results))
        return f"({params}) -> ({results})"

    def effects(function: Function) -> list[str]:
        return [n.op.name for n in function.body.walk() if has_effect(n)]

    for what, of in (("type", types), ("effects", effects)):
        if of(before) != of(after):
            raise VerifyError(
                f"the compiler pass {name} changes the {what} of {before.name}", location=location,
                expected=str(of(before)), received=str(of(after)),
            )  # fmt: skip


def _check_values(name: str, before: Function, after: Function, location: Location) -> None:
    for seed, arrays in enumerate(make_samples(before)):
        try:
            bounds = _find_bounds(before, arrays)
        except (TesseraError, IndexError, ValueError):  # these arguments are not legal ones: another sample may be
            continue
        try:
            results = graph_interpreter.run(after, arrays)
            bounds = _widen(bounds, _find_bounds(after, arrays))
        except TesseraError as error:
            raise VerifyError(
                f"after the compiler pass {name}, {before.name} fails where it did not: {error.message}",
                location=location,
            ) from error
        for number, (result, within) in enumerate(zip(results, bounds, strict=True)):
            _compare(name, before, location, f"result {number} of sample {seed}", np.asarray(result), within)


def _find_bounds(function: Function, arrays: Sequence[Any]) -> list[IntervalArray]:
    """The results of a function with their bounds; with a tolerance where an op has none."""
    try:
        return bound.run(function, list(arrays))
    except UnsupportedOpError:
        values = [np.asarray(v, np.float64) for v in graph_interpreter.run(function, list(arrays))]
        return [IntervalArray(v, np.full(v.shape, UNBOUNDED_TOLERANCE * max(np.max(np.abs(v), initial=0.0), 1e-30)))
                for v in values]  # fmt: skip


def _widen(before: Sequence[IntervalArray], after: Sequence[IntervalArray]) -> list[IntervalArray]:
    """The results before a pass with the bounds of both functions; those before alone where the others are infinite."""
    made = []
    for one, other in zip(before, after, strict=True):
        more = np.where(np.isfinite(other.radius), other.radius, 0.0) + REFERENCE_ERROR * np.abs(one.value)
        made.append(IntervalArray(one.value, one.radius + np.where(np.isfinite(more), more, 0.0)))
    return made


def _compare(
    name: str, function: Function, location: Location, what: str, result: np.ndarray, within: IntervalArray
) -> None:
    found = compare_with_bound(result, within)
    if found.ok:
        return
    at = found.where if found.unlike is None else found.unlike
    reference = np.asarray(within.value)[at] if np.ndim(within.value) else within.value
    got = result[at] if result.ndim else result
    raise VerifyError(
        f"the compiler pass {name} changes what {function.name} computes: {what}, element {tuple(map(int, at or ()))}",
        location=location, expected=f"{float(reference):.9g} within its error bound", received=f"{float(got):.9g}",
        suggestion="tessera inspect --pass-by-pass shows the program before and after it",
    )  # fmt: skip


# Samples.


def make_samples(function: Function) -> Iterator[list[np.ndarray]]:
    """Arrays for the parameters of a function: of usual size, with special values, and positive."""
    types = [p.type for p in function.params]
    sizes = dict.fromkeys(find_size_names(function), SYMBOLIC_SIZE)
    shapes = [tuple(_find_size(n, sizes) for n in t.shape) for t in types]
    if sum(int(np.prod(s)) for s in shapes) > MOST_ELEMENTS:
        return
    for seed, draw in enumerate((_draw_normal, _draw_special, _draw_positive)):
        rng = np.random.default_rng(seed)
        yield [_make_array(rng, t, s, draw) for t, s in zip(types, shapes, strict=True)]  # type: ignore[arg-type]


def _find_size(size: Any, sizes: dict[str, int]) -> int:
    return size if isinstance(size, int) else int(size.evaluate(sizes)) if sizes else int(estimate_size(size))


Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def _draw_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def _draw_special(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice(np.array([0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 0.5, 40.0, -40.0, 1e-3]), shape)


def _draw_positive(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.random(shape) + 0.01


def _make_array(rng: np.random.Generator, type: TensorType, shape: tuple[int, ...], draw: Draw) -> np.ndarray:
    dtype = type.dtype
    if dtype.is_float:
        return draw(rng, shape).astype(dtype.numpy)
    return rng.integers(0, 2, shape).astype(dtype.numpy)
