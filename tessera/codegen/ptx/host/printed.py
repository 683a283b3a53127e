"""What was printed: records that a launch left in memory, as lines in the order of programs, then places and tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.codegen.ptx.blocks.prints import ALIGN, END, HEAD, ROOM, TILE_BIT, WANTED, WORD
from tessera.codegen.spoken import line, named
from tessera.errors import ResourceError
from tessera.types import as_dtype

LEAST, MOST = 1 << 20, 1 << 28  # bytes of memory for what a launch prints
REPEATED = 64  # rounds that a loop is given room for
Key = tuple[int, ...]


def room(entry: Mapping[str, Any], programs: int) -> int:
    """The bytes for an entry's prints: all of those outside of loops, some of those in loops."""
    tiles = programs * max(site["group"] for site in entry["prints"])
    wanted = sum(site["bytes"] * REPEATED ** site["path"].count(None) for site in entry["prints"])
    return HEAD + min(max(tiles * wanted, LEAST), MOST)


def begin(entry: Mapping[str, Any], count: int) -> np.ndarray:
    """Nothing is printed yet, and there are so many bytes."""
    head = np.zeros(HEAD, np.uint8)
    for place, number in ((WANTED, HEAD), (ROOM, count), (END, count)):
        head[place : place + WORD].view(np.uint64)[0] = number
    return head


def used(head: np.ndarray, count: int) -> int:
    """Where records end."""
    return min(_number(head, WANTED), _number(head, END))


def _number(memory: np.ndarray, place: int) -> int:
    return int(memory[place : place + WORD].view(np.uint64)[0])


def show(entry: Mapping[str, Any], grid: Sequence[int], memories: Mapping[str, np.ndarray]) -> None:
    """Print what a launch said.

    Raises:
        ResourceError: there was no room for all of it; what there was room for has been printed.
    """
    found = memories["prints"]
    records = sorted(_records(entry["prints"], found), key=lambda record: record[0])
    for (program, *_, tile), site, values in records:
        print(f"{named(grid, site['group'], program, tile)}: {line(site['text'], site['ordered'], values)}")
    wanted, there = _number(found, WANTED), _number(found, ROOM)
    if wanted > there:
        raise ResourceError(
            "a launch prints more than its memory for that holds", expected=f"at most {there:,} bytes",
            received=f"{wanted:,} bytes", suggestion="print in fewer programs, or less often in loops",
        )  # fmt: skip


def _records(
    sites: Sequence[Mapping[str, Any]], found: np.ndarray
) -> Iterator[tuple[Key, Mapping[str, Any], list[Any]]]:
    """Each record that was written: what it is sorted by, its place in the text, and what it holds."""
    at, end = HEAD, used(found, len(found))
    while at < end:
        site = sites[_number(found, at) & ((1 << TILE_BIT) - 1)]
        yield _key(site, found, at), site, _values(site, found, at)
        at += site["bytes"]


def _key(site: Mapping[str, Any], found: np.ndarray, at: int) -> Key:
    """A program, then the place with the rounds of loops filled in, then a tile."""
    count = site["path"].count(None)
    where, program, *rounds = (int(n) for n in found[at : at + WORD * (2 + count)].view(np.uint64))
    turns = iter(rounds)
    return (program, *(next(turns) if step is None else step for step in site["path"]), where >> TILE_BIT)


def _values(site: Mapping[str, Any], found: np.ndarray, at: int) -> list[Any]:
    """The operands, which end the record."""
    values: list[Any] = []
    end = at + site["bytes"]
    for operand in reversed(site["operands"]):
        dtype = as_dtype(operand["dtype"]).numpy
        count = math.prod(operand["shape"]) * dtype.itemsize
        end -= -(-count // ALIGN) * ALIGN
        values.insert(0, found[end : end + count].view(dtype).reshape(operand["shape"]))
    return [v[()] if not v.ndim else v for v in values]
