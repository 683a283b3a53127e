"""Pairs of kernels: one that breaks a rule of the memory model, and its repair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import TesseraError


def eight() -> dict[str, Any]:
    """The integers 1 to 8 and memory for eight more: sums are exact in every order of atomic additions."""
    return {"x": np.arange(1, 9, dtype="f4"), "out": np.zeros(8, "f4")}


class Pair(NamedTuple):
    """A kernel that breaks a rule and its repair, both of (x, out), with the text of the report."""

    rule: str
    broken: Any
    repaired: Any
    error: type[TesseraError]
    says: tuple[str, ...]
    group: int | None = None
    grid: tuple[int, ...] | None = None
    arguments: Callable[[], dict[str, Any]] = eight
