"""What assertions found: memory for each kernel that has any, and the error of the first failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.codegen.ptx.checks import PROGRAM_BIT, TILE_BIT
from tessera.errors import ExecutionError, Location

NOTHING = np.uint64(2**64 - 1)


def fresh(entry: Mapping[str, Any]) -> np.ndarray:
    """The memory that an entry with assertions takes: nothing has failed yet."""
    return np.full(len(entry["reports"]), NOTHING, np.uint64)


def check(entry: Mapping[str, Any], grid: Sequence[int], found: np.ndarray) -> None:
    """Raise the first failure of a launch.

    Raises:
        ExecutionError: it names the program, the tile of a group, and the element.
    """
    if (found == NOTHING).all():
        return
    site = int(np.argmin(found))
    raise _failed(entry["reports"][site], grid, int(found[site]))


def _failed(site: Mapping[str, Any], grid: Sequence[int], key: int) -> ExecutionError:
    program, rest = key >> PROGRAM_BIT, key & (1 << PROGRAM_BIT) - 1
    tile, element = rest >> TILE_BIT, rest & (1 << TILE_BIT) - 1
    place = tuple(int(i) for i in np.unravel_index(program, tuple(grid)))
    name = f"program {place}" + (f", tile {tile}" if site["group"] > 1 else "")
    if site["shape"]:
        name += f", element {tuple(int(i) for i in np.unravel_index(element, tuple(site['shape'])))}"
    return ExecutionError(
        f"assertion failed: {site['text']}" if site["text"] else "assertion failed",
        location=Location(*site["place"]), expected="a condition that holds for every element of every program",
        received=f"false at {name}",
    )  # fmt: skip
