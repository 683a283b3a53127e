"""Diagnostics: prints and assertions of compiled programs, as records that are decoded and shown alike on every target.

The manifest describes each print and each assertion as a *site*: its text, its source location, the size of a group,
and the shape and dtype of its operands. A *record* is one execution of a site. LLVM code calls the host for each record
(`codegen/llvm/runtime/reports.py`); PTX code writes records to buffers in device memory, whose layout is below; a CSL
program keeps the number of its first failed site. Prints are shown in the order of programs; the first failed assertion
is raised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.codegen.artifact import parse_size
from tessera.core.errors import ExecutionError, Location, OutOfBoundsError, TesseraError
from tessera.core.symbolic_dim import round_up
from tessera.core.types import as_dtype
from tessera.ops.tensor.shape import make_index_error

Site = Mapping[str, Any]  # one print or assertion of the text, as the manifest describes it


def describe_location(location: Location) -> list[Any]:
    """A source location as JSON data; `Location(*data)` is the location again."""
    place = [location.file, location.line, location.column, location.end_column]
    return [*place, location.scope] if location.scope else place


def decode_operand(operand: Mapping[str, Any], data: np.ndarray) -> np.ndarray:
    """An operand of a record, of its bytes: elements in row-major order."""
    return data[: count_operand_bytes(operand)].view(as_dtype(operand["dtype"]).numpy).reshape(operand["shape"])


def count_operand_bytes(operand: Mapping[str, Any]) -> int:
    """The bytes that an operand takes in a record.

    >>> count_operand_bytes({"shape": [2, 3], "dtype": "f32"})
    24
    """
    return math.prod(operand["shape"]) * as_dtype(operand["dtype"]).numpy.itemsize


# What the user reads.


def format_tile_name(grid: Sequence[int], group: int, program: int, tile: int) -> str:
    """A program instance by its position in the grid, and in a group a tile by its number.

    >>> format_tile_name((2, 3), 1, 4, 0), format_tile_name((4,), 8, 2, 5)
    ('program (1, 1)', 'program (2,), tile 5')
    """
    numbers = tuple(int(i) for i in np.unravel_index(program, tuple(grid)))
    return f"program {numbers}" + (f", tile {tile}" if group > 1 else "")


def format_print_line(label: str, ordered: bool, values: Sequence[Any]) -> str:
    """The label, then the values; with `ordered`, the values replace the `{}` of the label.

    >>> format_print_line("x is {} of {}", True, [np.int64(3), np.arange(2)])
    'x is 3 of [0, 1]'
    >>> format_print_line("x", False, [np.float32(0.5)])
    'x 0.5'
    """
    words = [np.array2string(v, separator=", ") if np.ndim(v) else str(v) for v in values]
    return label.format(*words) if ordered else " ".join([label, *words] if label else words)


def show_print(site: Site, instance: str, values: Sequence[Any]) -> None:
    """Print the line of one record; `instance` names the program and tile."""
    print(f"{instance}: {format_print_line(site['text'], site['ordered'], values)}")


def make_assertion_error(site: Site, instance: str, element: tuple[int, ...], values: Sequence[str]) -> ExecutionError:
    """The error of a failed assertion: the instance, the element (() for a scalar) and the operands there."""
    where = f"{instance}, element {element}" if element else instance
    known = f" with {', '.join(values)}" if values else ""
    return ExecutionError(
        f"assertion failed: {site['text']}" if site["text"] else "assertion failed",
        location=Location(*site["place"]), expected="a condition that holds for every element of every program",
        received=f"false at {where}{known}",
    )  # fmt: skip


def make_index_site_error(site: Site, index: int | None) -> OutOfBoundsError:
    """The error of a checked index that is outside its axis."""
    error = make_index_error(index, parse_size(site["size"]), site["along"], what=site["what"], wrap=site["wrap"])
    error.location = Location(*site["place"])
    return error


# The buffers in device memory that a launch writes, in words of 8 bytes.

WORD_BYTES = 8

# Assertions. The failures buffer has one word for each site: the least key of its failures, whatever the order of
# threads. A key is the program's number in row-major order, then the tile's in its group, then the element's in the
# block. The values buffer has a counter of its bytes, then records: key, site, and the operands at that element.

ASSERT_TILE_BIT, ASSERT_PROGRAM_BIT = 22, 32  # of a key: the first bit of the tile's and of the program's number
MAX_SHOWN_VALUES = 14
ASSERT_RECORD_BYTES = WORD_BYTES * (2 + MAX_SHOWN_VALUES)
ASSERT_BUFFER_BYTES = 512 * ASSERT_RECORD_BYTES  # of records, after the counter
NO_FAILURE = np.uint64(2**64 - 1)


def decode_first_failure(
    sites: Sequence[Site], grid: Sequence[int], keys: np.ndarray, records: np.ndarray | None
) -> TesseraError | None:
    """The error of the failure in the first program; None if every assertion held."""
    if (keys == NO_FAILURE).all():
        return None
    number = int(np.argmin(keys >> np.uint64(ASSERT_PROGRAM_BIT)))
    site, key = sites[number], int(keys[number])
    program, rest = key >> ASSERT_PROGRAM_BIT, key & (1 << ASSERT_PROGRAM_BIT) - 1
    tile, element = rest >> ASSERT_TILE_BIT, rest & (1 << ASSERT_TILE_BIT) - 1
    index = tuple(int(i) for i in np.unravel_index(element, tuple(site["shape"]))) if site["shape"] else ()
    instance = format_tile_name(grid, site["group"], program, tile)
    values = _decode_failure_values(site, number, key, records)
    if site.get("kind") == "index":
        return make_index_site_error(site, int(values[0]) if values else None)
    return make_assertion_error(site, instance, index, values)


def _decode_failure_values(site: Site, number: int, key: int, records: np.ndarray | None) -> list[str]:
    """The operands at a failure; none if the values buffer was full."""
    for start in range(WORD_BYTES, 0 if records is None else len(records), ASSERT_RECORD_BYTES):
        words = records[start : start + ASSERT_RECORD_BYTES].view(np.uint64)  # type: ignore[index]
        if int(words[0]) == key and int(words[1]) == number:
            dtypes = [as_dtype(name).numpy for name in site["values"]]
            pairs = zip(words[2:], dtypes, strict=False)
            return [str(np.frombuffer(word.tobytes()[: dtype.itemsize], dtype)[0]) for word, dtype in pairs]
    return []


# Prints. The header holds the bytes wanted, the capacity and where records end: a record that does not fit is counted
# and dropped, as are those after it. A record holds the numbers of the site and the tile, the program, the iteration of
# each loop around the site, and the operands, each padded to a multiple of PRINT_ALIGN.

PRINT_ALIGN = 16
WANTED_AT, CAPACITY_AT, END_AT, HEADER_BYTES = 0, 8, 16, 32  # byte offsets of the header's words; its size
PRINT_TILE_BIT = 32  # of a record's first word: the first bit of the tile's number

RecordKey = tuple[int, ...]


def read_word(buffer: np.ndarray, offset: int) -> int:
    """The word at a byte offset."""
    return int(buffer[offset : offset + WORD_BYTES].view(np.uint64)[0])


def count_print_bytes(header: np.ndarray) -> int:
    """Where the records of a print buffer end."""
    return min(read_word(header, WANTED_AT), read_word(header, END_AT))


def show_print_records(sites: Sequence[Site], grid: Sequence[int], buffer: np.ndarray) -> None:
    """Print every record of a print buffer, in the order of programs and then as one program executes them."""
    for (program, *_, tile), site, values in sorted(_iterate_print_records(sites, buffer), key=lambda each: each[0]):
        show_print(site, format_tile_name(grid, site["group"], program, tile), values)


def _iterate_print_records(sites: Sequence[Site], buffer: np.ndarray) -> Iterator[tuple[RecordKey, Site, list[Any]]]:
    """Each record: its sort key, its site and its operands."""
    start, end = HEADER_BYTES, count_print_bytes(buffer)
    while start < end:
        site = sites[read_word(buffer, start) & ((1 << PRINT_TILE_BIT) - 1)]
        record = buffer[start : start + site["bytes"]]
        yield _decode_record_key(site, record), site, _decode_record_operands(site, record)
        start += site["bytes"]


def _decode_record_key(site: Site, record: np.ndarray) -> RecordKey:
    """The program, then the path to the site with the iterations of loops filled in, then the tile."""
    loops = site["path"].count(None)
    first, program, *iterations = (int(n) for n in record[: WORD_BYTES * (2 + loops)].view(np.uint64))
    remaining = iter(iterations)
    path = (next(remaining) if step is None else step for step in site["path"])
    return (program, *path, first >> PRINT_TILE_BIT)


def _decode_record_operands(site: Site, record: np.ndarray) -> list[Any]:
    """The operands, which end the record."""
    values: list[Any] = []
    start = len(record)
    for operand in reversed(site["operands"]):
        start -= round_up(count_operand_bytes(operand), PRINT_ALIGN)
        values.insert(0, decode_operand(operand, record[start:]))
    return [v[()] if not v.ndim else v for v in values]
