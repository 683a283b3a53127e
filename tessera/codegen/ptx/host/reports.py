"""What assertions found: memory for each kernel that has any, and the error of the first failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.codegen.ptx.blocks.checks import PROGRAM_BIT, RECORD, ROOM, TILE_BIT, WORD
from tessera.codegen.spoken import named
from tessera.errors import ExecutionError, Location
from tessera.types import as_dtype

NOTHING = np.uint64(2**64 - 1)


def room(entry: Mapping[str, Any], programs: int) -> int:
    """The bytes of an entry's assertions."""
    return NOTHING.nbytes * len(entry["reports"])


def begin(entry: Mapping[str, Any], count: int) -> np.ndarray:
    """Nothing has failed yet."""
    return np.full(count // NOTHING.nbytes, NOTHING, np.uint64).view(np.uint8)


def used(head: np.ndarray, count: int) -> int:
    """All of it."""
    return count


def room_of_values(entry: Mapping[str, Any], programs: int) -> int:
    """The bytes for what stands beside conditions."""
    return WORD + ROOM


def no_values(entry: Mapping[str, Any], count: int) -> np.ndarray:
    """There are no records yet."""
    return np.zeros(WORD, np.uint8)


def used_by_values(head: np.ndarray, count: int) -> int:
    """All records that there was room for."""
    return min(WORD + int(head.view(np.uint64)[0]), count)


def check(entry: Mapping[str, Any], grid: Sequence[int], memories: Mapping[str, np.ndarray]) -> None:
    """Raise the first failure of a launch.

    Raises:
        ExecutionError: it names the program, the tile of a group, the element, and what the values are there.
    """
    found = memories["reports"].view(np.uint64)
    if (found == NOTHING).all():
        return
    site = int(np.argmin(found >> np.uint64(PROGRAM_BIT)))
    described, key = entry["reports"][site], int(found[site])
    raise _failed(described, grid, key, _beside(described, site, key, memories.get("values")))


def _beside(site: Mapping[str, Any], number: int, key: int, memory: np.ndarray | None) -> list[str]:
    """The values at a failure, if its record found room."""
    for at in range(WORD, 0 if memory is None else len(memory), RECORD):
        words = memory[at : at + RECORD].view(np.uint64)  # type: ignore[index]
        if int(words[0]) == key and int(words[1]) == number:
            kinds = [as_dtype(name).numpy for name in site["values"]]
            parts = zip(words[2:], kinds, strict=False)
            return [str(np.frombuffer(w.tobytes()[: kind.itemsize], kind)[0]) for w, kind in parts]
    return []


def _failed(site: Mapping[str, Any], grid: Sequence[int], key: int, values: Sequence[str]) -> ExecutionError:
    program, rest = key >> PROGRAM_BIT, key & (1 << PROGRAM_BIT) - 1
    tile, element = rest >> TILE_BIT, rest & (1 << TILE_BIT) - 1
    name = named(grid, site["group"], program, tile)
    if site["shape"]:
        name += f", element {tuple(int(i) for i in np.unravel_index(element, tuple(site['shape'])))}"
    known = f" with {', '.join(values)}" if values else ""
    return ExecutionError(
        f"assertion failed: {site['text']}" if site["text"] else "assertion failed",
        location=Location(*site["place"]), expected="a condition that holds for every element of every program",
        received=f"false at {name}{known}",
    )  # fmt: skip
