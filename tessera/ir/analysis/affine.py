"""Affine analysis: an index as a constant plus multiples of scalars and of positions along axes (Karr 1976).

The kernel front end recognises blocks of memory by it, the PTX generator proves and narrows masks by it. Each op that
computes indices has its rule beside its definition.

Three forms of index stay separate, since they answer other questions. `tessera.lower.indexing_maps` has mixed-radix
digits
of iteration dims, in which a division that comes out even stays exact. `tessera.interp.tile.affine` has numbers of a
run, one step for each instance axis, in the hot path of the interpreter. `tessera.ir.numerics.interval_arithmetic` has
error bounds of floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.core.types import TensorType, int64
from tessera.ir.core import Node, Value
from tessera.ir.rules import Rules

# rule(analysis, node) gives the affine form of the result, or None where it is not affine.
affine_rules = Rules("affine form")


@dataclass(frozen=True)
class AffineForm:
    """A constant, plus multiples of scalars, plus multiples of the position along axes of a block (`ramps`).

    Axes count from the end (-1 is the last), so that broadcasting does not move them; an axis of size 1 has no ramp.
    """

    constant: int = 0
    scalars: Mapping[Value, int] = field(default_factory=dict)
    ramps: Mapping[int, int] = field(default_factory=dict)

    def plus(self, other: AffineForm, sign: int = 1) -> AffineForm:
        """The sum with another form, or with `sign` -1 the difference."""
        return AffineForm(
            self.constant + sign * other.constant,
            add_terms(self.scalars, other.scalars, sign),
            add_terms(self.ramps, other.ramps, sign),
        )

    def times(self, factor: int) -> AffineForm:
        """A multiple of this form."""
        return AffineForm().plus(self, factor)

    @property
    def is_constant(self) -> bool:
        """Whether there are neither scalars nor ramps."""
        return not self.scalars and not self.ramps

    def upper_bound_of_block(self, shape: Sequence[int]) -> int:
        """The constant, plus the most that the ramps add in a block of this shape."""
        return self.constant + sum(max(c * (shape[a] - 1), 0) for a, c in self.ramps.items())


def add_terms(x: Mapping[Any, int], y: Mapping[Any, int], sign: int = 1) -> dict[Any, int]:
    """The sum of two linear combinations; terms with the coefficient 0 are left out."""
    total = {k: x.get(k, 0) + sign * y.get(k, 0) for k in (*x, *y)}
    return {k: c for k, c in total.items() if c}


class AffineAnalysis:
    """The affine forms of values, by their defining nodes.

    A scalar that is not affine is a term of its own. `follows` tells the nodes to look through. Integers narrower than
    int64 may wrap: they have forms only where `narrow` is set.
    """

    def __init__(
        self,
        producers: Mapping[Value, Node],
        follows: Callable[[Node], bool] = lambda node: True,
        narrow: bool = False,
    ) -> None:
        self.producers = producers
        self.follows = follows
        self.narrow = narrow

    def find_form(self, value: Value) -> AffineForm | None:
        """The affine form of an index or a block of indices, or None."""
        if not isinstance(value.type, TensorType) or not (self.narrow or value.type.dtype == int64):
            return None
        node = self.producers.get(value)
        rule = affine_rules.get(node.op) if node is not None and self.follows(node) else None
        found = rule(self, node) if rule is not None else None
        return AffineForm(0, {value: 1}) if found is None and not value.type.rank else found


def add_forms(analysis: AffineAnalysis, node: Node, sign: int = 1) -> AffineForm | None:
    """The form of a sum, or with `sign` -1 of a difference."""
    x, y = (analysis.find_form(v) for v in node.args)
    return None if x is None or y is None else x.plus(y, sign)


def multiply_forms(analysis: AffineAnalysis, node: Node) -> AffineForm | None:
    """The form of a product, one side of which is a constant."""
    x, y = (analysis.find_form(v) for v in node.args)
    if x is None or y is None or not (x.is_constant or y.is_constant):
        return None
    return x.times(y.constant) if y.is_constant else y.times(x.constant)


def move_ramps(form: AffineForm | None, before: Value, after: Value) -> AffineForm | None:
    """The form after a reshape that only adds or drops axes of size 1; any reshape, where there are no ramps."""
    if form is None or not form.ramps:
        return form
    old, new = (_find_long_axes(v) for v in (before, after))
    if list(old.values()) != list(new.values()):
        return None
    names = dict(zip(old, new, strict=True))
    return AffineForm(form.constant, form.scalars, {names[a]: c for a, c in form.ramps.items()})


def _find_long_axes(value: Value) -> dict[int, Any]:
    """The axes that are not of size 1, counted from the end, with their sizes."""
    shape = value.type.shape
    return {a - len(shape): n for a, n in enumerate(shape) if n != 1}
