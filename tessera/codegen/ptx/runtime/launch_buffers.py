"""Launch buffers: device memory behind an entry's hidden parameters, initialised before and examined after a launch.

Prints are shown in the order of programs, the first failed assertion is raised, and a grid barrier that some programs
never reached is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.codegen.diagnostics import (
    ASSERT_BUFFER_BYTES,
    CAPACITY_AT,
    END_AT,
    HEADER_BYTES,
    NO_FAILURE,
    WANTED_AT,
    WORD_BYTES,
    count_print_bytes,
    decode_first_failure,
    format_tile_name,
    read_word,
    show_print_records,
)
from tessera.codegen.ptx.table.blocks.program_grid import DEADLOCK_AT, FIRST_EXIT_AT, GRID_BARRIER_BYTES, SITE_BIT
from tessera.codegen.ptx.text.builder import HIDDEN_PARAMETERS
from tessera.core.errors import BarrierError, Location, ResourceError

# What assertions found: memory for each kernel that has any, and the error of the first failure.


def assertion_buffer_bytes(entry: Mapping[str, Any], programs: int) -> int:
    """The bytes of an entry's assertions."""
    return NO_FAILURE.nbytes * len(entry["reports"])


def initial_assertions(entry: Mapping[str, Any], count: int) -> np.ndarray:
    """Nothing has failed yet."""
    return np.full(count // NO_FAILURE.nbytes, NO_FAILURE, np.uint64).view(np.uint8)


def assertion_bytes_used(head: np.ndarray, count: int) -> int:
    """All of it."""
    return count


def value_buffer_bytes(entry: Mapping[str, Any], programs: int) -> int:
    """The bytes for what stands beside conditions."""
    return WORD_BYTES + ASSERT_BUFFER_BYTES


def initial_values(entry: Mapping[str, Any], count: int) -> np.ndarray:
    """There are no records yet."""
    return np.zeros(WORD_BYTES, np.uint8)


def value_bytes_used(head: np.ndarray, count: int) -> int:
    """All records that there was room for."""
    return min(WORD_BYTES + int(head.view(np.uint64)[0]), count)


def check_assertions(entry: Mapping[str, Any], grid: Sequence[int], memories: Mapping[str, np.ndarray]) -> None:
    """Raise the first failure of a launch.

    Raises:
        ExecutionError: it names the program, the tile of a group, the element, and what the values are there.
    """
    error = decode_first_failure(entry["reports"], grid, memories["reports"].view(np.uint64), memories.get("values"))
    if error is not None:
        raise error


# What was printed: records that a launch left in memory, as lines in the order of programs, then places and tiles.


MIN_PRINT_BYTES, MAX_PRINT_BYTES = 1 << 20, 1 << 28  # bytes of memory for what a launch prints
ASSUMED_ROUNDS = 64  # rounds that a loop is given room for


def print_buffer_bytes(entry: Mapping[str, Any], programs: int) -> int:
    """The bytes for an entry's prints: all of those outside of loops, some of those in loops."""
    tiles = programs * max(site["group"] for site in entry["prints"])
    wanted = sum(site["bytes"] * ASSUMED_ROUNDS ** site["path"].count(None) for site in entry["prints"])
    return HEADER_BYTES + min(max(tiles * wanted, MIN_PRINT_BYTES), MAX_PRINT_BYTES)


def initial_prints(entry: Mapping[str, Any], count: int) -> np.ndarray:
    """Nothing is printed yet, and there are so many bytes."""
    head = np.zeros(HEADER_BYTES, np.uint8)
    for place, number in ((WANTED_AT, HEADER_BYTES), (CAPACITY_AT, count), (END_AT, count)):
        head[place : place + WORD_BYTES].view(np.uint64)[0] = number
    return head


def print_bytes_used(head: np.ndarray, count: int) -> int:
    """Where records end."""
    return count_print_bytes(head)


def show_prints(entry: Mapping[str, Any], grid: Sequence[int], memories: Mapping[str, np.ndarray]) -> None:
    """Print what a launch said.

    Raises:
        ResourceError: there was no room for all of it; what there was room for has been printed.
    """
    found = memories["prints"]
    show_print_records(entry["prints"], grid, found)
    wanted, there = read_word(found, WANTED_AT), read_word(found, CAPACITY_AT)
    if wanted > there:
        raise ResourceError(
            "a launch prints more than its memory for that holds",
            expected=f"at most {there:,} bytes",
            received=f"{wanted:,} bytes",
            suggestion="print in fewer programs, or less often in loops",
        )


# Grids that did not meet: the error of the first barrier at which a program waited for one that had ended.


NO_PROGRAM = np.uint64(2**64 - 1)
COUNTER_BYTES = NO_PROGRAM.nbytes


def barrier_buffer_bytes(entry: Mapping[str, Any], programs: int) -> int:
    """The bytes of a launch's counts."""
    return GRID_BARRIER_BYTES


def initial_barrier_state(entry: Mapping[str, Any], count: int) -> np.ndarray:
    """Nobody has come, nobody has ended, nobody waits in vain."""
    words = np.zeros(count // COUNTER_BYTES, np.uint64)
    words[DEADLOCK_AT // COUNTER_BYTES] = NO_PROGRAM
    return words.view(np.uint8)


def barrier_bytes_used(head: np.ndarray, count: int) -> int:
    """All of it."""
    return count


def check_grid_barrier(entry: Mapping[str, Any], grid: Sequence[int], memories: Mapping[str, np.ndarray]) -> None:
    """Raise where programs parted.

    Raises:
        BarrierError: it names a program that came to a barrier and one that did not.
    """
    words = memories["meeting"].view(np.uint64)
    if words[DEADLOCK_AT // COUNTER_BYTES] == NO_PROGRAM:
        return
    site, came = divmod(int(words[DEADLOCK_AT // COUNTER_BYTES]), 1 << SITE_BIT)
    missing = int(words[FIRST_EXIT_AT // COUNTER_BYTES]) - 1
    raise BarrierError(
        f"a grid barrier is reached by {format_tile_name(grid, 1, came, 0)} "
        f"and not by {format_tile_name(grid, 1, missing, 0)}",
        location=Location(*entry["meeting"][site]["place"]),
        expected="all programs of the launch, with all their tiles, at the same barrier",
        suggestion="move it out of the `if` or loop whose condition differs between programs",
    )


# Extras of entries on the host: how much memory, what it holds before a launch, and what is done with it after.


EntryManifest = Mapping[str, Any]


@dataclass(frozen=True)
class BufferKind:
    """One kind of memory, in bytes: how many for an entry and its number of programs; what stands at its begin before a
    launch, where there are so many; how many are to be looked at, by what stands there; and what to do with them, when
    the program's grid and all kinds' memory are known."""

    room: Callable[[EntryManifest, int], int]
    begin: Callable[[EntryManifest, int], np.ndarray]
    used: Callable[[np.ndarray, int], int]
    finish: Callable[[EntryManifest, Sequence[int], Mapping[str, np.ndarray]], None] | None


# In the order in which they are looked at: all that was printed, then the first thing that failed.
BUFFER_KINDS = {
    "prints": BufferKind(print_buffer_bytes, initial_prints, print_bytes_used, show_prints),
    "reports": BufferKind(assertion_buffer_bytes, initial_assertions, assertion_bytes_used, check_assertions),
    "values": BufferKind(value_buffer_bytes, initial_values, value_bytes_used, None),
    "meeting": BufferKind(barrier_buffer_bytes, initial_barrier_state, barrier_bytes_used, check_grid_barrier),
}


class LaunchBuffers:
    """The extras of one launch of an entry over a grid of programs."""

    def __init__(self, entry: EntryManifest, grid: Sequence[int]) -> None:
        self._entry, self._grid = entry, tuple(grid)
        programs = math.prod(self._grid)
        self.rooms = {kind: BUFFER_KINDS[kind].room(entry, programs) for kind in HIDDEN_PARAMETERS if kind in entry}

    def begin(self, kind: str) -> np.ndarray:
        """What stands at the begin of a kind's memory before the launch."""
        return BUFFER_KINDS[kind].begin(self._entry, self.rooms[kind])

    def used(self, kind: str, begin: np.ndarray) -> int:
        """How many bytes are to be looked at after it, by what stands at the begin then."""
        return BUFFER_KINDS[kind].used(begin, self.rooms[kind])

    def memories(self) -> dict[str, np.ndarray]:
        """New memory for each kind, in the order of the parameters."""
        found = {}
        for kind, count in self.rooms.items():
            begin = self.begin(kind)
            found[kind] = np.zeros(count, np.uint8)
            found[kind][: len(begin)] = begin
        return found

    def finish(self, memories: Mapping[str, np.ndarray]) -> None:
        """Look at what a launch left.

        Raises:
            ExecutionError: an assertion failed.
            ResourceError: more was printed than there is room for.
            BarrierError: the programs of the grid did not meet.
        """
        for kind, extra in BUFFER_KINDS.items():
            if kind in memories and extra.finish is not None:
                extra.finish(self._entry, self._grid, memories)
