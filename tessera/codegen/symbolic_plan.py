"""Symbolic plans: a host plan whose sizes are expressions, and its binding to the sizes of a call.

In the JSON data of a plan `{"size": "4*B"}` stands where a plan of known sizes has a number. `bind_plan` replaces each
by its value, so that everything that executes a plan sees numbers alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np

from tessera.core.errors import ArgumentError, ArtifactError, ShapeError
from tessera.core.shapes import SizeConstraint, as_size, bind_program_sizes
from tessera.core.symbolic_dim import Dim, Size

SIZE_KEY = "size"
MAX_BOUND_PLANS = 16  # the bound plans that a program keeps: each has a workspace


def describe_size(size: Size) -> Any:
    """A size as JSON data."""
    return {SIZE_KEY: repr(size)} if isinstance(size, Dim) else int(size)


def parse_size(data: Any) -> Size:
    """A size from JSON data.

    Raises:
        ArtifactError: the data is no size.
    """
    if isinstance(data, int) and not isinstance(data, bool):
        return data
    try:
        if isinstance(data, Mapping) and set(data) == {SIZE_KEY} and len(data[SIZE_KEY]) < 1000:
            return as_size(data[SIZE_KEY])
    except (ShapeError, TypeError, ValueError, ArithmeticError, RecursionError):
        pass
    raise ArtifactError(f"{data!r:.100} is not a size", suggestion="build the artifact again")


def bind_plan(plan: Any, sizes: Mapping[str, int]) -> Any:
    """The plan with the value of each size.

    >>> bind_plan({"grid": [{"size": "B"}, 1]}, {"B": 3})
    {'grid': [3, 1]}
    """
    if isinstance(plan, Mapping):
        if set(plan) == {SIZE_KEY}:
            return _evaluate(plan, sizes)
        return {k: bind_plan(v, sizes) for k, v in plan.items()}
    return [bind_plan(v, sizes) for v in plan] if isinstance(plan, (list, tuple)) else plan


def _evaluate(data: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    size = parse_size(data)
    try:
        value = size.evaluate(sizes) if isinstance(size, Dim) else size
    except (ShapeError, ArithmeticError):  # a division by zero
        value = size
    if isinstance(value, Dim):
        raise ArtifactError(f"the plan has no size {value}", suggestion="build the artifact again")
    return value


class SizeBinder:
    """Finds the sizes of a call from the shapes of its arrays, and checks the constraints of the program."""

    def __init__(self, plan: Mapping[str, Any], lines: Mapping[str, str] = MappingProxyType({})) -> None:
        inputs = [p for p in plan["params"] if p["role"] != "output"]
        self.names = [str(p["name"]) for p in inputs]
        self.patterns = [tuple(parse_size(n) for n in p["shape"]) for p in inputs]
        self.constraints = [SizeConstraint(text, lines.get(text, "")) for text in plan.get("constraints", ())]

    def bind(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """The sizes of a call.

        Raises:
            ArgumentError: there are more or fewer arrays than parameters.
            ShapeError: as `bind_program_sizes`.
        """
        if len(shapes) != len(self.patterns):
            raise ArgumentError("wrong number of arguments", expected=len(self.patterns), received=len(shapes))
        return bind_program_sizes(self.names, self.patterns, shapes, self.constraints)


P = TypeVar("P")


class BoundPlans(Generic[P]):
    """What a runtime makes of a plan, for the sizes of each call; the plans of the latest sizes are kept.

    `make(plan)` takes a plan of known sizes; a plan without symbolic sizes is made once, at the start.
    """

    def __init__(self, plan: Mapping[str, Any], make: Callable[[Mapping[str, Any]], P]) -> None:
        self._plan, self._make = plan, make
        self._binder = SizeBinder(plan) if "sizes" in plan else None
        self._only = make(plan) if self._binder is None else None
        self._made: OrderedDict[tuple[tuple[int, ...], ...], P] = OrderedDict()

    def find(self, arrays: Sequence[Any]) -> P:
        """What was made for the sizes of these arrays."""
        if self._only is not None:
            return self._only
        shapes = tuple([a.shape if a.__class__ is np.ndarray else np.shape(a) for a in arrays])
        found = self._made.get(shapes)
        if found is None:
            assert self._binder is not None
            found = self._made[shapes] = self._make(bind_plan(self._plan, self._binder.bind(shapes)))
            if len(self._made) > MAX_BOUND_PLANS:
                self._made.popitem(last=False)
        return found
