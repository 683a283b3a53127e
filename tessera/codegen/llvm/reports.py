"""What compiled programs report while they run: kept until all are done, then printed or raised, in order."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import llvmlite.binding as llvm
import numpy as np

from tessera.codegen.llvm.report import NAME
from tessera.codegen.spoken import line, named
from tessera.errors import DeadlockError, ExecutionError, Location
from tessera.types import as_dtype

Read = Callable[[int, int], np.ndarray]  # the bytes at an address


class Reports:
    """The reports of one artifact; `sites` says what each number of a site stands for."""

    _open: WeakValueDictionary[int, Reports] = WeakValueDictionary()
    _numbers = itertools.count(1)

    def __init__(self, sites: Sequence[Mapping[str, Any]]) -> None:
        self.sites = sites
        self.context = next(Reports._numbers) if sites else 0
        self._found: list[tuple[int, int, int, list[np.ndarray]]] = []
        self._lock = Lock()
        self.broken: Exception | None = None
        if sites:
            Reports._open[self.context] = self

    @classmethod
    def of(cls, context: int) -> Reports:
        """The reports of this number."""
        return cls._open[context]

    def add(self, site: int, program: int, table: int, read: Read) -> None:
        """Keep what a program says."""
        operands = self.sites[site]["operands"]
        places = read(table, 8 * len(operands)).view(np.int64)
        blocks = [_block(o, read, int(p)) for o, p in zip(operands, places, strict=True)]
        with self._lock:
            self._found.append((program, len(self._found), site, blocks))

    def finish(self) -> None:
        """Print what was printed, program after program, and raise the first assertion that failed.

        Raises:
            ExecutionError: an assertion did not hold; the error names the program, tile and element.
        """
        with self._lock:
            found, self._found = sorted(self._found, key=lambda f: f[:2]), []
            broken, self.broken = self.broken, None
        if broken is not None:
            raise broken
        for program, _, site, blocks in found:
            if self.sites[site]["kind"] == "print":
                _print(self.sites[site], program, blocks)
        for program, _, site, blocks in found:
            if self.sites[site]["kind"] != "print":
                raise ERRORS[self.sites[site]["kind"]](self.sites[site], program, blocks)


def _block(operand: Mapping[str, Any], read: Read, place: int) -> np.ndarray:
    dtype = as_dtype(operand["dtype"]).numpy
    count = math.prod(operand["shape"])
    return read(place, count * dtype.itemsize).view(dtype).reshape(operand["shape"])


def _name(site: Mapping[str, Any], program: int, tile: int) -> str:
    """An instance in words: its program and, in a group, its tile."""
    return named(site["grid"] or [program + 1], site["group"], program, tile)


def _print(site: Mapping[str, Any], program: int, blocks: list[np.ndarray]) -> None:
    active, *values = blocks
    for tile in np.flatnonzero(active):
        own = [v[tile] for v in values]
        print(f"{_name(site, program, int(tile))}: {line(site['text'], site['ordered'], own)}")


def _failed(site: Mapping[str, Any], program: int, blocks: list[np.ndarray]) -> ExecutionError:
    wrong, *values = blocks
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    held = [str(v[first[: v.ndim]] if v.ndim <= len(first) else v[first[:1]]) for v in values]
    known = f" with {', '.join(held)}" if held else ""
    element = f", element {first[1:]}" if len(first) > 1 else ""
    return ExecutionError(
        f"assertion failed: {site['text']}" if site["text"] else "assertion failed",
        location=Location(*site["place"]),
        expected="a condition that holds for every element of every program",
        received=f"false at {_name(site, program, first[0])}{element}{known}",
    )


def _deadlock(site: Mapping[str, Any], program: int, blocks: list[np.ndarray]) -> ExecutionError:
    return DeadlockError(
        site["text"], location=Location(*site["place"]), expected="as many arrivals, and bytes, as the phase takes",
        received=f"{int(blocks[0].sum())} tiles wait, first {_name(site, program, int(blocks[0].argmax()))}",
        suggestion="let each phase have its arrivals, and wait for parities 0, 1, 0, … in turn",
    )  # fmt: skip


ERRORS = {"assert": _failed, "deadlock": _deadlock}


def _bytes(place: int, count: int) -> np.ndarray:
    return np.frombuffer(ctypes.string_at(place, count), np.uint8).copy()


_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


@_SIGNATURE
def _called(context: int, site: int, program: int, table: int) -> None:
    reports = Reports.of(context)
    try:
        reports.add(site, program, table, _bytes)
    except Exception as error:  # nothing is raised through machine code: it waits for the end of the run
        reports.broken = error


@cache
def offer() -> None:
    """Let machine code find the function that takes reports."""
    llvm.add_symbol(NAME, ctypes.cast(_called, ctypes.c_void_p).value)
