"""What a trace is of and what it gives: a call's arguments taken apart, and the Graph function made of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.closures import hashable
from tessera.errors import ArgumentError, Location, here
from tessera.ir.core import Function
from tessera.pytree import Tree
from tessera.tensor import Tensor
from tessera.types import TensorType


@dataclass(frozen=True)
class Traced:
    """A Graph function, the arrays it closed over (its last parameters), and the shape of what it returns."""

    function: Function
    captures: tuple[np.ndarray, ...]
    results: Tree
    # The tensors among what it closed over that ask for gradients, by their place.
    owners: tuple[tuple[int, Tensor], ...] = ()
    # Where it stops in the debugger, as `ts.debug.break_here` asked.
    pauses: tuple[Location, ...] = ()


@dataclass(frozen=True)
class Call:
    """A call's arguments taken apart: traced leaves with their types, everything else by value."""

    names: tuple[str, ...]
    types: tuple[TensorType, ...]
    leaves: tuple[Any, ...]
    static: tuple[tuple[str, Any], ...]
    tree: Tree

    def key(self) -> Hashable:
        """What a cached trace depends on."""
        return self.names, self.types, tuple((k, hashable(v)) for k, v in self.static), self.tree


def static_names(names: Sequence[str], by_name: Sequence[str], by_place: Sequence[int]) -> set[str]:
    """The parameters, of those with `names`, that are passed by value.

    >>> sorted(static_names(["x", "axis"], (), (1,)))
    ['axis']

    Raises:
        ArgumentError: there is no such parameter.
    """
    wrong = [n for n in by_name if n not in names] + [i for i in by_place if not -len(names) <= i < len(names)]
    if wrong:
        raise ArgumentError(
            f"there is no parameter {wrong[0]} to be static", location=here(), expected=", ".join(names) or "none"
        )
    return {*by_name, *(names[i] for i in by_place)}
