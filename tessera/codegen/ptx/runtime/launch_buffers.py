"""Launch buffers: device memory behind an entry's hidden parameters, initialised before and examined after a launch.

Prints are shown in the order of programs, the first failed assertion is raised, and a grid barrier that some programs
never reached is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.codegen.print_format import format_print_line, format_tile_name
from tessera.codegen.ptx.table.blocks.diagnostics import (
    ASSERT_BUFFER_BYTES,
    ASSERT_PROGRAM_BIT,
    ASSERT_RECORD_BYTES,
    ASSERT_TILE_BIT,
    ASSERT_WORD,
    CAPACITY_AT,
    END_AT,
    HEADER_BYTES,
    PRINT_ALIGN,
    PRINT_TILE_BIT,
    PRINT_WORD,
    WANTED_AT,
)
from tessera.codegen.ptx.table.blocks.program_grid import DEADLOCK_AT, FIRST_EXIT_AT, GRID_BARRIER_BYTES, SITE_BIT
from tessera.codegen.ptx.text.builder import HIDDEN_PARAMETERS
from tessera.core.errors import BarrierError, ExecutionError, Location, ResourceError
from tessera.core.types import as_dtype

# What assertions found: memory for each kernel that has any, and the error of the first failure.


NO_FAILURE = np.uint64(2**64 - 1)


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
    return ASSERT_WORD + ASSERT_BUFFER_BYTES


def initial_values(entry: Mapping[str, Any], count: int) -> np.ndarray:
    """There are no records yet."""
    return np.zeros(ASSERT_WORD, np.uint8)


def value_bytes_used(head: np.ndarray, count: int) -> int:
    """All records that there was room for."""
    return min(ASSERT_WORD + int(head.view(np.uint64)[0]), count)


def check_assertions(entry: Mapping[str, Any], grid: Sequence[int], memories: Mapping[str, np.ndarray]) -> None:
    """Raise the first failure of a launch.

    Raises:
        ExecutionError: it names the program, the tile of a group, the element, and what the values are there.
    """
    found = memories["reports"].view(np.uint64)
    if (found == NO_FAILURE).all():
        return
    site = int(np.argmin(found >> np.uint64(ASSERT_PROGRAM_BIT)))
    described, key = entry["reports"][site], int(found[site])
    raise _assertion_error(described, grid, key, _failure_values(described, site, key, memories.get("values")))


def _failure_values(site: Mapping[str, Any], number: int, key: int, memory: np.ndarray | None) -> list[str]:
    """The values at a failure, if its record found room."""
    for at in range(ASSERT_WORD, 0 if memory is None else len(memory), ASSERT_RECORD_BYTES):
        words = memory[at : at + ASSERT_RECORD_BYTES].view(np.uint64)  # type: ignore[index]
        if int(words[0]) == key and int(words[1]) == number:
            kinds = [as_dtype(name).numpy for name in site["values"]]
            parts = zip(words[2:], kinds, strict=False)
            return [str(np.frombuffer(w.tobytes()[: kind.itemsize], kind)[0]) for w, kind in parts]
    return []


def _assertion_error(site: Mapping[str, Any], grid: Sequence[int], key: int, values: Sequence[str]) -> ExecutionError:
    program, rest = key >> ASSERT_PROGRAM_BIT, key & (1 << ASSERT_PROGRAM_BIT) - 1
    tile, element = rest >> ASSERT_TILE_BIT, rest & (1 << ASSERT_TILE_BIT) - 1
    name = format_tile_name(grid, site["group"], program, tile)
    if site["shape"]:
        name += f", element {tuple(int(i) for i in np.unravel_index(element, tuple(site['shape'])))}"
    known = f" with {', '.join(values)}" if values else ""
    return ExecutionError(
        f"assertion failed: {site['text']}" if site["text"] else "assertion failed",
        location=Location(*site["place"]), expected="a condition that holds for every element of every program",
        received=f"false at {name}{known}",
    )  # fmt: skip


# What was printed: records that a launch left in memory, as lines in the order of programs, then places and tiles.


MIN_PRINT_BYTES, MAX_PRINT_BYTES = 1 << 20, 1 << 28  # bytes of memory for what a launch prints
ASSUMED_ROUNDS = 64  # rounds that a loop is given room for
RecordKey = tuple[int, ...]


def print_buffer_bytes(entry: Mapping[str, Any], programs: int) -> int:
    """The bytes for an entry's prints: all of those outside of loops, some of those in loops."""
    tiles = programs * max(site["group"] for site in entry["prints"])
    wanted = sum(site["bytes"] * ASSUMED_ROUNDS ** site["path"].count(None) for site in entry["prints"])
    return HEADER_BYTES + min(max(tiles * wanted, MIN_PRINT_BYTES), MAX_PRINT_BYTES)


def initial_prints(entry: Mapping[str, Any], count: int) -> np.ndarray:
    """Nothing is printed yet, and there are so many bytes."""
    head = np.zeros(HEADER_BYTES, np.uint8)
    for place, number in ((WANTED_AT, HEADER_BYTES), (CAPACITY_AT, count), (END_AT, count)):
        head[place : place + PRINT_WORD].view(np.uint64)[0] = number
    return head


def print_bytes_used(head: np.ndarray, count: int) -> int:
    """Where records end."""
    return min(_read_word(head, WANTED_AT), _read_word(head, END_AT))


def _read_word(memory: np.ndarray, place: int) -> int:
    return int(memory[place : place + PRINT_WORD].view(np.uint64)[0])


def show_prints(entry: Mapping[str, Any], grid: Sequence[int], memories: Mapping[str, np.ndarray]) -> None:
    """Print what a launch said.

    Raises:
        ResourceError: there was no room for all of it; what there was room for has been printed.
    """
    found = memories["prints"]
    records = sorted(_iterate_records(entry["prints"], found), key=lambda record: record[0])
    for (program, *_, tile), site, values in records:
        print(
            f"{format_tile_name(grid, site['group'], program, tile)}: "
            f"{format_print_line(site['text'], site['ordered'], values)}"
        )
    wanted, there = _read_word(found, WANTED_AT), _read_word(found, CAPACITY_AT)
    if wanted > there:
        raise ResourceError(
            "a launch prints more than its memory for that holds",
            expected=f"at most {there:,} bytes",
            received=f"{wanted:,} bytes",
            suggestion="print in fewer programs, or less often in loops",
        )


def _iterate_records(
    sites: Sequence[Mapping[str, Any]], found: np.ndarray
) -> Iterator[tuple[RecordKey, Mapping[str, Any], list[Any]]]:
    """Each record that was written: what it is sorted by, its place in the text, and what it holds."""
    at, end = HEADER_BYTES, print_bytes_used(found, len(found))
    while at < end:
        site = sites[_read_word(found, at) & ((1 << PRINT_TILE_BIT) - 1)]
        yield _record_key(site, found, at), site, _record_values(site, found, at)
        at += site["bytes"]


def _record_key(site: Mapping[str, Any], found: np.ndarray, at: int) -> RecordKey:
    """A program, then the place with the rounds of loops filled in, then a tile."""
    count = site["path"].count(None)
    where, program, *rounds = (int(n) for n in found[at : at + PRINT_WORD * (2 + count)].view(np.uint64))
    turns = iter(rounds)
    return (program, *(next(turns) if step is None else step for step in site["path"]), where >> PRINT_TILE_BIT)


def _record_values(site: Mapping[str, Any], found: np.ndarray, at: int) -> list[Any]:
    """The operands, which end the record."""
    values: list[Any] = []
    end = at + site["bytes"]
    for operand in reversed(site["operands"]):
        dtype = as_dtype(operand["dtype"]).numpy
        count = math.prod(operand["shape"]) * dtype.itemsize
        end -= -(-count // PRINT_ALIGN) * PRINT_ALIGN
        values.insert(0, found[end : end + count].view(dtype).reshape(operand["shape"]))
    return [v[()] if not v.ndim else v for v in values]


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
