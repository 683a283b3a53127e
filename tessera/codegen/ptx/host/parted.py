"""Grids that did not meet: the error of the first barrier at which a program waited for one that had ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.codegen.ptx.blocks.meeting import BYTES, EARLY, LOST, SITE_BIT
from tessera.codegen.spoken import named
from tessera.errors import BarrierError, Location

NOBODY = np.uint64(2**64 - 1)
WORD = NOBODY.nbytes


def room(entry: Mapping[str, Any], programs: int) -> int:
    """The bytes of a launch's counts."""
    return BYTES


def begin(entry: Mapping[str, Any], count: int) -> np.ndarray:
    """Nobody has come, nobody has ended, nobody waits in vain."""
    words = np.zeros(count // WORD, np.uint64)
    words[LOST // WORD] = NOBODY
    return words.view(np.uint8)


def used(head: np.ndarray, count: int) -> int:
    """All of it."""
    return count


def check(entry: Mapping[str, Any], grid: Sequence[int], memories: Mapping[str, np.ndarray]) -> None:
    """Raise where programs parted.

    Raises:
        BarrierError: it names a program that came to a barrier and one that did not.
    """
    words = memories["meeting"].view(np.uint64)
    if words[LOST // WORD] == NOBODY:
        return
    site, came = divmod(int(words[LOST // WORD]), 1 << SITE_BIT)
    missing = int(words[EARLY // WORD]) - 1
    raise BarrierError(
        f"a grid barrier is reached by {named(grid, 1, came, 0)} and not by {named(grid, 1, missing, 0)}",
        location=Location(*entry["meeting"][site]["place"]),
        expected="all programs of the launch, with all their tiles, at the same barrier",
        suggestion="move it out of the `if` or loop whose condition differs between programs",
    )  # fmt: skip
