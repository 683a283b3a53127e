"""Reports of compiled programs: the records that machine code passes to the host, shown or raised after a run."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import llvmlite.binding as llvm
import numpy as np

from tessera.codegen.diagnostics import (
    Site,
    count_operand_bytes,
    decode_operand,
    format_tile_name,
    make_assertion_error,
    make_index_site_error,
    show_print,
)
from tessera.codegen.llvm.text.protocol import REPORT_FUNCTION
from tessera.core.errors import DeadlockError, ExecutionError, Location, OutOfBoundsError

ReadBytes = Callable[[int, int], np.ndarray]  # (address, count) to bytes


ReportRecord = tuple[int, int, int, list[np.ndarray]]  # program, number, site, operands


class ReportCollector:
    """The records of one artifact during a run; `context` is the number by which machine code names the artifact."""

    _collectors: WeakValueDictionary[int, ReportCollector] = WeakValueDictionary()
    _numbers = itertools.count(1)

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = sites
        self.context = next(ReportCollector._numbers) if sites else 0
        self._records: list[ReportRecord] = []
        self._lock = Lock()
        self.callback_error: Exception | None = None
        if sites:
            ReportCollector._collectors[self.context] = self

    @classmethod
    def of(cls, context: int) -> ReportCollector:
        """The collector of this number."""
        return cls._collectors[context]

    def add(self, site: int, program: int, table: int, read: ReadBytes) -> None:
        """Keep the record of a program; `table` is the address of its operands' addresses."""
        operands = self.sites[site]["operands"]
        addresses = read(table, 8 * len(operands)).view(np.int64)
        blocks = [_read_operand(o, read, int(a)) for o, a in zip(operands, addresses, strict=True)]
        with self._lock:
            self._records.append((program, len(self._records), site, blocks))

    def discard(self) -> None:
        """Forget the records of a run that was interrupted."""
        with self._lock:
            self._records, self.callback_error = [], None

    @property
    def has_bad_index(self) -> bool:
        """Whether an index out of bounds was reported."""
        return any(self.sites[site]["kind"] == "index" for _, _, site, _ in self._records)

    def finish(self, sites: Sequence[Site] | None = None) -> None:
        """Show the prints in the order of programs, then raise the first failure.

        `sites` are those of the plan that ran, if its grids have sizes that only the call knows.

        Raises:
            ExecutionError: an assertion failed; the error names the program, tile and element.
            OutOfBoundsError: an index is outside its axis.
            DeadlockError: tiles wait at an mbarrier whose phase cannot complete.
        """
        if not self._records and self.callback_error is None:
            return  # as after most calls
        with self._lock:
            records, self._records = sorted(self._records, key=lambda r: r[:2]), []
            callback_error, self.callback_error = self.callback_error, None
        if callback_error is not None:
            raise callback_error
        known = self.sites if sites is None else sites
        for program, _, site, blocks in records:
            if known[site]["kind"] == "print":
                _show_prints(known[site], program, blocks)
        _raise_failure(known, records)


def _raise_failure(sites: Sequence[Site], records: Sequence[ReportRecord]) -> None:
    failures = [r for r in records if sites[r[2]]["kind"] != "print"]
    for program, _, site, blocks in sorted(failures, key=lambda r: (r[0], r[2], r[1])):
        raise REPORT_ERRORS[sites[site]["kind"]](sites[site], program, blocks)


def _read_operand(operand: Mapping[str, Any], read: ReadBytes, address: int) -> np.ndarray:
    return decode_operand(operand, read(address, count_operand_bytes(operand)))


def _format_instance(site: Site, program: int, tile: int) -> str:
    """The program and, in a group, the tile; a kernel whose grid is not known has a linear one."""
    return format_tile_name(site["grid"] or [program + 1], site["group"], program, tile)


def _show_prints(site: Site, program: int, blocks: list[np.ndarray]) -> None:
    """One line for each active tile of the program."""
    active, *values = blocks
    for tile in np.flatnonzero(active):
        show_print(site, _format_instance(site, program, int(tile)), [v[tile] for v in values])


def _make_assertion_error(site: Site, program: int, blocks: list[np.ndarray]) -> ExecutionError:
    failed, *values = blocks
    tile, *element = (int(i) for i in np.argwhere(failed)[0])
    index = (tile, *element)
    shown = [str(v[index[: v.ndim]] if v.ndim <= len(index) else v[index[:1]]) for v in values]
    return make_assertion_error(site, _format_instance(site, program, tile), tuple(element), shown)


def _make_deadlock_error(site: Site, program: int, blocks: list[np.ndarray]) -> ExecutionError:
    waiting = blocks[0]
    first = _format_instance(site, program, int(waiting.argmax()))
    return DeadlockError(
        site["text"], location=Location(*site["place"]), expected="every arrival and every byte that the phase expects",
        received=f"{int(waiting.sum())} tiles wait, first {first}",
        suggestion="make all arrivals of each phase, and wait for parities 0, 1, 0, … in order",
    )  # fmt: skip


def _make_index_error(site: Site, program: int, blocks: list[np.ndarray]) -> OutOfBoundsError:
    return make_index_site_error(site, int(blocks[0]))


REPORT_ERRORS = {"assert": _make_assertion_error, "deadlock": _make_deadlock_error, "index": _make_index_error}


def _copy_bytes(address: int, count: int) -> np.ndarray:
    return np.frombuffer(ctypes.string_at(address, count), np.uint8).copy()


_CALLBACK_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


@_CALLBACK_TYPE
def _receive_report(context: int, site: int, program: int, table: int) -> None:
    reports = ReportCollector.of(context)
    try:
        reports.add(site, program, table, _copy_bytes)
    except Exception as error:  # an exception cannot pass through machine code: `finish` raises it
        reports.callback_error = error


@cache
def register_report_symbol() -> None:
    """Give machine code the address of the function that receives reports."""
    llvm.add_symbol(REPORT_FUNCTION, ctypes.cast(_receive_report, ctypes.c_void_p).value)
