"""A compiled artifact ready to run: it follows the launch plan of the manifest, with no IR at hand."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from tessera.codegen.arguments import Arguments, Parameter
from tessera.codegen.artifact import Artifact
from tessera.codegen.llvm import meetings
from tessera.codegen.llvm.jit import Code
from tessera.codegen.llvm.looped import Looped
from tessera.codegen.llvm.pool import FIELDS, Crew, address, aligned, thread_count
from tessera.codegen.llvm.report import CONTEXT
from tessera.codegen.llvm.reports import Reports, offer
from tessera.errors import BarrierError

TEXT = "kernels.ll"
SHARES = 8  # chunks for each thread, so that none waits long for the last


class Program:
    """Machine code, workspace and launch plan of an artifact."""

    def __init__(self, artifact: Artifact, threads: int | None = None) -> None:
        plan = artifact.manifest["plan"]
        self._arguments = Arguments(plan)
        self.threads = thread_count(threads)
        offer()
        if "meeting" in plan:
            meetings.offer()
        self._code = Code(artifact.text(TEXT))
        self._crew = Crew(self.threads, max(plan["scratch"].values(), default=0))
        self._workspace = aligned(plan["workspace"])
        self._lock = Lock()
        self._parted: BarrierError | None = None
        self._reports = Reports(plan.get("reports", ()))
        self._connect()
        self._table(plan["launches"], [*plan.get("flags", ()), *(a for c in plan.get("calls", ()) for a in c["args"])])
        self._meetings = meetings.Meetings(plan, self._code)
        self._looped = self._loops(plan) if "steps" in plan else None

    def _table(self, launches: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> None:
        """The tasks, and which slots hold which parameter; flags and what the host takes come last."""
        sizes = [len(each["args"]) + 3 for each in launches]
        starts = [0, *itertools.accumulate(sizes)]
        self._slots = np.zeros(starts[-1] + len(others), np.int64)
        self._others = starts[-1]
        self._places = [*enumerate(others, starts[-1])]
        self._tasks = np.zeros((len(launches), FIELDS), np.int64)
        uses: list[list[int]] = [[] for _ in self._arguments.params]
        for row, (start, each) in enumerate(zip(starts, launches, strict=False)):
            self._places += enumerate(each["args"], start)
            self._slots[start + len(each["args"]) : starts[row + 1]] = each["grid"]
            total = math.prod(each["grid"])
            chunk = max(1, total // (self.threads * SHARES))
            entry = self._code.address(f"{each['kernel']}.task")
            self._tasks[row] = (entry, address(self._slots) + 8 * start, total, chunk)
        for place, arg in self._places:
            if "param" in arg:
                uses[arg["param"]].append(place)
            else:
                self._slots[place] = address(self._workspace) + arg["offset"]
        self._uses = [np.array(places, np.intp) for places in uses]
        self._alone = self.threads == 1 or max((math.prod(e["grid"]) for e in launches), default=0) < 2

    def _loops(self, plan: Mapping[str, Any]) -> Looped:
        many = [math.prod(e["grid"]) > 1 and self.threads > 1 for e in plan["launches"]]

        def launch(first: int, last: int) -> None:
            self._launch(first, last, not any(many[first:last]))

        return Looped(plan, self._slots, self._others, self._places, launch)

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The outputs; arrays that the program writes are written.

        Raises:
            ShapeError, DTypeError, ArgumentError: the arrays are not what the program takes.
            ExecutionError: an assertion of the program does not hold.
            BarrierError: programs wait at a grid barrier for others that have ended.
        """
        users, held = self._arguments.bind(arrays)
        with self._lock:
            for places, p, a in zip(self._uses, self._arguments.params, held, strict=True):
                self._slots[places] = slot(p, a)
            if self._looped is None:
                self._launch(0, len(self._tasks), self._alone)
            else:
                self._looped.run()
            parted, self._parted = self._parted, None
        outputs = self._arguments.finish(users, held)
        self._reports.finish()
        if parted is not None:
            raise parted
        return outputs

    def _launch(self, first: int, last: int, alone: bool) -> None:
        for start, stop, meets in self._meetings.parts(first, last):
            if meets:
                self._parted = self._meetings.run(start, self._tasks[start]) or self._parted
            else:
                self._crew.run(self._tasks[start:stop], alone)

    def _connect(self) -> None:
        """Tell the code whose reports it makes."""
        if self._reports.sites:
            ctypes.c_int64.from_address(self._code.variable(CONTEXT)).value = self._reports.context


def slot(parameter: Parameter, array: np.ndarray) -> int:
    """The eight bytes for a kernel: an address, or the scalar itself."""
    if not parameter.scalar:
        return address(array)
    return int.from_bytes(array.tobytes().ljust(8, b"\0"), "little", signed=True)
