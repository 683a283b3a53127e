"""The values of a random Graph program in construction, and the table of the kinds of statements on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.tools.fuzz.choices import Choices

LIMIT = 20_000  # elements of a value


class ValuePool:
    """The values of a program in construction: their names, and samples with shape and type."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.samples: dict[str, Any] = {}
        self.used: set[str] = set()

    def find(self, fits: Callable[[Any], bool] = lambda sample: True) -> str | None:
        """The name of a value that fits, the last one first; None without one."""
        names = [n for n, sample in reversed(self.samples.items()) if fits(sample)]
        return self.choices.pick(names) if names else None

    def find_like(self, name: str) -> str:
        """An operand for an op with a value: another of its type and a shape that broadcasts, or a number."""
        sample = self.samples[name]

        def fits(other: Any) -> bool:
            try:
                shape = np.broadcast_shapes(other.shape, sample.shape)
            except ValueError:
                return False
            same = other.dtype is sample.dtype and other.type.policy == sample.type.policy
            return bool(same and np.prod(shape) <= LIMIT)

        found = [n for n, other in self.samples.items() if fits(other)]
        number = ("1", "2", "-1", "0", "3") if not is_float(sample) else ("0.5", "1.0", "-2.0", "0.0", "3.0", "1e-3")
        names = [*reversed(found), *number] if sample.dtype.kind != "bool" else found
        return self.choices.pick(names)


def is_float(sample: Any) -> bool:
    """Whether a value has floats."""
    return bool(sample.dtype.is_float)


def is_integer(sample: Any) -> bool:
    """Whether a value has integers."""
    return bool(sample.dtype.is_integer)


def is_number(sample: Any) -> bool:
    """Whether a value has no bools."""
    return sample.dtype.kind != "bool"


def is_bool(sample: Any) -> bool:
    """Whether a value has bools."""
    return not is_number(sample)


def has_axes(sample: Any) -> bool:
    """Whether a value is not a scalar."""
    return bool(sample.ndim > 0)


Rule = Callable[[Choices, ValuePool, str], str | None]
RULES: list[Callable[[Choices, ValuePool], str | None]] = []


def rule(fits: Callable[[Any], bool], weight: int = 1) -> Callable[[Rule], Rule]:
    """Register a kind of statement on a value that fits, drawn in proportion to its weight."""

    def add(function: Rule) -> Rule:
        def apply(c: Choices, pool: ValuePool) -> str | None:
            name = pool.find(fits)
            return None if name is None else function(c, pool, name)

        RULES.extend([apply] * weight)
        return function

    return add
