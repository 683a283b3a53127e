"""Reports of compiled programs: collected during a run, then printed or raised in program order."""

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

from tessera.codegen.llvm.table.program_ops import REPORT_FUNCTION
from tessera.codegen.print_format import format_print_line, format_tile_name
from tessera.core.errors import DeadlockError, ExecutionError, Location
from tessera.core.types import as_dtype

ReadBytes = Callable[[int, int], np.ndarray]  # the bytes at an address


class ReportCollector:
    """The reports of one artifact; `sites` says what each number of a site stands for."""

    _open: WeakValueDictionary[int, ReportCollector] = WeakValueDictionary()
    _numbers = itertools.count(1)

    def __init__(self, sites: Sequence[Mapping[str, Any]]) -> None:
        self.sites = sites
        self.context = next(ReportCollector._numbers) if sites else 0
        self._found: list[tuple[int, int, int, list[np.ndarray]]] = []
        self._lock = Lock()
        self.broken: Exception | None = None
        if sites:
            ReportCollector._open[self.context] = self

    @classmethod
    def of(cls, context: int) -> ReportCollector:
        """The reports of this number."""
        return cls._open[context]

    def add(self, site: int, program: int, table: int, read: ReadBytes) -> None:
        """Keep what a program says."""
        operands = self.sites[site]["operands"]
        places = read(table, 8 * len(operands)).view(np.int64)
        blocks = [_read_block(o, read, int(p)) for o, p in zip(operands, places, strict=True)]
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
                _print_report(self.sites[site], program, blocks)
        for program, _, site, blocks in found:
            if self.sites[site]["kind"] != "print":
                raise REPORT_ERRORS[self.sites[site]["kind"]](self.sites[site], program, blocks)


def _read_block(operand: Mapping[str, Any], read: ReadBytes, place: int) -> np.ndarray:
    dtype = as_dtype(operand["dtype"]).numpy
    count = math.prod(operand["shape"])
    return read(place, count * dtype.itemsize).view(dtype).reshape(operand["shape"])


def _format_instance(site: Mapping[str, Any], program: int, tile: int) -> str:
    """An instance in words: its program and, in a group, its tile."""
    return format_tile_name(site["grid"] or [program + 1], site["group"], program, tile)


def _print_report(site: Mapping[str, Any], program: int, blocks: list[np.ndarray]) -> None:
    active, *values = blocks
    for tile in np.flatnonzero(active):
        own = [v[tile] for v in values]
        print(f"{_format_instance(site, program, int(tile))}: {format_print_line(site['text'], site['ordered'], own)}")


def _make_assertion_error(site: Mapping[str, Any], program: int, blocks: list[np.ndarray]) -> ExecutionError:
    wrong, *values = blocks
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    held = [str(v[first[: v.ndim]] if v.ndim <= len(first) else v[first[:1]]) for v in values]
    known = f" with {', '.join(held)}" if held else ""
    element = f", element {first[1:]}" if len(first) > 1 else ""
    return ExecutionError(
        f"assertion failed: {site['text']}" if site["text"] else "assertion failed",
        location=Location(*site["place"]),
        expected="a condition that holds for every element of every program",
        received=f"false at {_format_instance(site, program, first[0])}{element}{known}",
    )


def _make_deadlock_error(site: Mapping[str, Any], program: int, blocks: list[np.ndarray]) -> ExecutionError:
    return DeadlockError(
        site["text"], location=Location(*site["place"]), expected="as many arrivals, and bytes, as the phase takes",
        received=f"{int(blocks[0].sum())} tiles wait, first {_format_instance(site, program, int(blocks[0].argmax()))}",
        suggestion="let each phase have its arrivals, and wait for parities 0, 1, 0, … in turn",
    )  # fmt: skip


REPORT_ERRORS = {"assert": _make_assertion_error, "deadlock": _make_deadlock_error}


def _copy_bytes(place: int, count: int) -> np.ndarray:
    return np.frombuffer(ctypes.string_at(place, count), np.uint8).copy()


_CALLBACK_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


@_CALLBACK_TYPE
def _receive_report(context: int, site: int, program: int, table: int) -> None:
    reports = ReportCollector.of(context)
    try:
        reports.add(site, program, table, _copy_bytes)
    except Exception as error:  # nothing is raised through machine code: it waits for the end of the run
        reports.broken = error


@cache
def register_report_symbol() -> None:
    """Let machine code find the function that takes reports."""
    llvm.add_symbol(REPORT_FUNCTION, ctypes.cast(_receive_report, ctypes.c_void_p).value)
