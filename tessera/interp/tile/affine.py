"""Affine scalars: integers with a fixed stride along each instance axis, kept as an origin and strides.

Program ids, and what programs compute from them, are nearly always of this kind. Index arithmetic then takes a few
Python integers however many instances there are, and a block access is seen at once to be a strided view.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.ir.rules import Rules
from tessera.ops.tensor import elementwise


@dataclass(slots=True)  # not frozen: a frozen dataclass doubles the cost of each one
class AffineScalar:
    """`origin` plus, for each instance axis, a step times the instance's index along it (int64)."""

    origin: int
    steps: tuple[int, ...]

    @property
    def constant(self) -> bool:
        """Whether the value is the same for every instance."""
        return not any(self.steps)

    def array(self, count: tuple[int, ...]) -> np.ndarray:
        """The values of `count` instances along each axis; axes of step 0 have size 1."""
        return _materialise(self.origin, self.steps, count)

    def ends(self, count: tuple[int, ...]) -> tuple[int, int]:
        """The least and the greatest value."""
        low = high = self.origin
        for step, n in zip(self.steps, count, strict=True):
            if step > 0:
                high += step * (n - 1)
            elif step:
                low += step * (n - 1)
        return low, high

    def cut(self, axis: int, low: int) -> AffineScalar:
        """The same scalar for the instances from `low` on along an axis."""
        return AffineScalar(self.origin + self.steps[axis] * low, self.steps) if self.steps[axis] else self


@lru_cache(maxsize=512)
def _materialise(origin: int, steps: tuple[int, ...], count: tuple[int, ...]) -> np.ndarray:
    total = np.full((1,) * len(count), origin, np.int64)
    for axis, (step, n) in enumerate(zip(steps, count, strict=True)):
        if step:
            shape = (1,) * axis + (n,) + (1,) * (len(count) - axis - 1)
            total = total + (np.arange(n) * step).reshape(shape)
    total.flags.writeable = False  # cached arrays are shared
    return total


affine_arithmetic_rules = Rules("affine arithmetic")


@affine_arithmetic_rules(elementwise.add)
def _(x: AffineScalar, y: AffineScalar) -> AffineScalar:
    return AffineScalar(x.origin + y.origin, tuple(a + b for a, b in zip(x.steps, y.steps, strict=True)))


@affine_arithmetic_rules(elementwise.sub)
def _(x: AffineScalar, y: AffineScalar) -> AffineScalar:
    return AffineScalar(x.origin - y.origin, tuple(a - b for a, b in zip(x.steps, y.steps, strict=True)))


@affine_arithmetic_rules(elementwise.mul)
def _(x: AffineScalar, y: AffineScalar) -> AffineScalar | None:
    if not x.constant:
        x, y = y, x
    return AffineScalar(x.origin * y.origin, tuple(x.origin * b for b in y.steps)) if x.constant else None


@affine_arithmetic_rules(elementwise.neg)
def _(x: AffineScalar) -> AffineScalar:
    return AffineScalar(-x.origin, tuple(-a for a in x.steps))


def combine_affine(op: Any, args: list[Any]) -> AffineScalar | None:
    """Apply an op to affine scalars; None where the result is not affine."""
    rule = affine_arithmetic_rules.get(op)
    return rule(*args) if rule is not None and all(type(a) is AffineScalar for a in args) else None
