"""A planted bug: a kernel that breaks a rule of the memory model, and its repaired twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import TesseraError


def eight() -> dict[str, Any]:
    """The numbers 1 to 8 and room for eight more: whole, so that every order of atomic additions gives the same."""
    return {"x": np.arange(1, 9, dtype="f4"), "out": np.zeros(8, "f4")}


class Pair(NamedTuple):
    """A kernel that breaks a rule and its repaired twin, both of (x, out), with what the report must say."""

    rule: str
    broken: Any
    repaired: Any
    error: type[TesseraError]
    says: tuple[str, ...]
    group: int | None = None
    grid: tuple[int, ...] | None = None
    arguments: Callable[[], dict[str, Any]] = eight
