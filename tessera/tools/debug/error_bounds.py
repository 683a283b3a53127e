"""Error bounds for users: how many digits of a function's results are certain, and the line at which they were lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, Location, user_location
from tessera.frontend.jit.tracing import Jit, to_array
from tessera.interp import bound
from tessera.ir.core import Node
from tessera.ir.numerics.interval_arithmetic import IntervalArray

ALL_DIGITS = 17.0  # of an f64 whose bound is 0
LOST = 0.5  # digits: a smaller loss is that of ordinary rounding


@dataclass(frozen=True)
class ResultDigits:
    """One result: its values, how far each may lie from the exact one, and the certain decimal digits of elements."""

    values: np.ndarray
    radius: np.ndarray
    least: float
    median: float


@dataclass(frozen=True)
class DigitLoss:
    """An op whose result has fewer certain digits than its operands."""

    op: str
    location: Location
    before: float
    after: float

    def __str__(self) -> str:
        lost = self.before - self.after
        said = f"{lost:.1f} digits are lost by {self.op} at {self.location}"
        return f"{said}: {self.before:.1f} before, {self.after:.1f} after"


@dataclass(frozen=True)
class ErrorBound:
    """The certain digits of the results of a call, and the ops that lost the most, the greatest loss first."""

    results: tuple[ResultDigits, ...]
    losses: tuple[DigitLoss, ...]

    @property
    def digits(self) -> float:
        """The certain digits of the worst element of all results."""
        return min((r.least for r in self.results), default=ALL_DIGITS)

    def __str__(self) -> str:
        lines = [
            f"result {i}: {r.least:.1f} correct digits in the worst element, {r.median:.1f} in the median"
            for i, r in enumerate(self.results)
        ]
        return "\n".join([*lines, *(str(each) for each in self.losses)])


def error_bound(function: Callable[..., Any], most: int = 3) -> Callable[..., ErrorBound]:
    """A function that runs `function` in bound mode and tells how many digits of its results are certain.

    The bound covers every legal evaluation on any target: any order of sums, with or without fused multiply-adds, each
    function within its documented error. Arguments count as exact. `most` is how many losses are listed.

    Raises:
        ArgumentError: `function` is no function of tensors.
        ExecutionError: a branch rests on a value that rounding may change.

    >>> import numpy as np
    >>> import tessera as ts
    >>> found = ts.debug.error_bound(lambda x: (1.0 + x) - 1.0)(np.float32([1e-5]))
    >>> 1.5 < found.digits < 3.0, found.losses[0].op
    (True, 'ts.sub')
    """
    if not callable(function):
        raise ArgumentError(
            "error_bound takes a function of tensors", received=type(function).__name__, location=user_location()
        )
    entry = function if isinstance(function, Jit) else Jit(function)

    def run(*args: Any, **named: Any) -> ErrorBound:
        call, traced = entry.bind(args, named), entry.trace(*args, **named)
        state = traced.random.peek() if traced.random is not None else ()
        arrays = [*(to_array(leaf) for leaf in call.leaves), *traced.captures, *state]
        losses: list[DigitLoss] = []

        def observe(node: Node, operands: Sequence[Any], results: Sequence[IntervalArray]) -> None:
            losses.extend(_find_loss(node, operands, results))

        with np.errstate(all="ignore"):
            results = bound.run(traced.function, arrays, observe=observe)
            measured = tuple(_measure(r) for r in results)
        losses.sort(key=lambda each: each.after - each.before)
        return ErrorBound(measured, tuple(losses[:most]))

    return run


def _find_loss(node: Node, operands: Sequence[Any], results: Sequence[IntervalArray]) -> list[DigitLoss]:
    floats = [x for x in operands if isinstance(x, IntervalArray) and x.dtype.kind == "f" and x.size]
    outs = [r for r in results if r.dtype.kind == "f" and r.size]
    if not floats or not outs:
        return []
    before, after = min(_digits(x).min() for x in floats), min(_digits(r).min() for r in outs)
    before = min(before, -np.log10(np.finfo(_find_storage(node)).eps))
    return [DigitLoss(node.op.name, node.loc, float(before), float(after))] if before - after > LOST else []


def _find_storage(node: Node) -> Any:
    """The float type whose digits a result of the op can have."""
    dtype = node.results[0].type.dtype
    return np.float64 if dtype.bits > 32 else np.float32


def _measure(result: IntervalArray) -> ResultDigits:
    digits = _digits(result)
    least, median = (float(digits.min()), float(np.median(digits))) if digits.size else (ALL_DIGITS, ALL_DIGITS)
    return ResultDigits(result.value, result.radius, least, median)


def _digits(result: IntervalArray) -> np.ndarray:
    """The certain decimal digits of each element: of an exact one all, of one that may be 0 none."""
    value, radius = np.abs(result.value.astype(np.float64)), np.broadcast_to(result.radius, result.shape)
    relative = np.where(radius == 0, 0.0, np.where(value > radius, radius / np.where(value == 0, 1.0, value), 1.0))
    return np.clip(-np.log10(np.maximum(relative, 10.0**-ALL_DIGITS)), 0.0, ALL_DIGITS)
