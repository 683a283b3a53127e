"""Compiled program: machine code, workspace and host plan of an artifact, ready to run without IR."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.host_plan import (
    ArgumentBinder,
    PlanParameter,
    execute_plan,
    run_host_call,
    view_as_array,
    view_bytes_at,
)
from tessera.codegen.llvm.runtime import thread_pool
from tessera.codegen.llvm.runtime.jit import MachineCode
from tessera.codegen.llvm.runtime.reports import ReportCollector, register_report_symbol
from tessera.codegen.llvm.runtime.thread_pool import (
    TASK_FIELDS,
    WorkerPool,
    allocate_aligned,
    choose_thread_count,
)
from tessera.codegen.llvm.table.program_ops import REPORT_CONTEXT
from tessera.core.array_memory import array_address
from tessera.core.errors import BarrierError

# Plans with loops and branches on machine code: slots move as loops turn, flags are read where they lie.


LaunchFunction = Callable[[int, int], None]


class NativePlanEngine:
    """The engine of one program: `slots` hold addresses, those of flags from `flags` on.

    `places` are (slot, argument) for each argument of the plan's launches and then for each flag.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        slots: np.ndarray,
        flags: int,
        places: Iterable[tuple[int, Any]],
        launch: LaunchFunction,
    ) -> None:
        self._steps, self._slots, self._flags, self.launch = plan["steps"], slots, flags, launch
        self._calls, start = [], flags + len(plan["flags"])
        for each in plan.get("calls", ()):
            self._calls.append((each, start))
            start += len(each["args"])
        found: dict[int, list[tuple[int, int]]] = {}
        for slot, arg in places:
            for loop, count in arg.get("moves", ()):
                found.setdefault(loop, []).append((slot, count))
        self._moves = {loop: np.array(pairs, np.intp).T for loop, pairs in found.items()}
        self._at = dict.fromkeys(found, 0)

    def run(self) -> None:
        """Follow the plan."""
        try:
            execute_plan(self._steps, self)
        finally:
            for loop in self._at:
                self.turn(loop, 0)

    def turn(self, loop: int, index: int) -> None:
        """Move what moves with a loop."""
        if loop in self._moves:
            slots, counts = self._moves[loop]
            self._slots[slots] += (index - self._at[loop]) * counts
            self._at[loop] = index

    def call(self, number: int) -> None:
        """Run an op on the host, on the memory that its slots name."""
        found, start = self._calls[number]
        run_host_call(
            found,
            [view_as_array(view_bytes_at(int(self._slots[start + i]), a), a) for i, a in enumerate(found["args"])],
        )

    def holds(self, flag: int) -> bool:
        """Whether a flag is set."""
        return bool(ctypes.c_uint8.from_address(int(self._slots[self._flags + flag])).value)


# A compiled artifact ready to run: it follows the launch plan of the manifest, with no IR at hand.


TEXT_FILE = "kernels.ll"
CHUNKS_PER_THREAD = 8  # chunks for each thread, so that none waits long for the last


class LlvmProgram:
    """Machine code, workspace and launch plan of an artifact."""

    def __init__(self, artifact: Artifact, threads: int | None = None) -> None:
        plan = artifact.manifest["plan"]
        self._arguments = ArgumentBinder(plan)
        self.threads = choose_thread_count(threads)
        register_report_symbol()
        if "meeting" in plan:
            thread_pool.register_barrier_symbol()
        self._code = MachineCode(artifact.text(TEXT_FILE))
        self._crew = WorkerPool(self.threads, max(plan["scratch"].values(), default=0))
        self._workspace = allocate_aligned(plan["workspace"])
        self._lock = Lock()
        self._parted: BarrierError | None = None
        self._reports = ReportCollector(plan.get("reports", ()))
        self._connect()
        self._table(plan["launches"], [*plan.get("flags", ()), *(a for c in plan.get("calls", ()) for a in c["args"])])
        self._meetings = thread_pool.CooperativeLaunches(plan, self._code)
        self._looped = self._loops(plan) if "steps" in plan else None

    def _table(self, launches: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> None:
        """The tasks, and which slots hold which parameter; flags and what the host takes come last."""
        sizes = [len(each["args"]) + 3 for each in launches]
        starts = [0, *itertools.accumulate(sizes)]
        self._slots = np.zeros(starts[-1] + len(others), np.int64)
        self._others = starts[-1]
        self._places = [*enumerate(others, starts[-1])]
        self._tasks = np.zeros((len(launches), TASK_FIELDS), np.int64)
        uses: list[list[int]] = [[] for _ in self._arguments.params]
        for row, (start, each) in enumerate(zip(starts, launches, strict=False)):
            self._places += enumerate(each["args"], start)
            self._slots[start + len(each["args"]) : starts[row + 1]] = each["grid"]
            total = math.prod(each["grid"])
            chunk = max(1, total // (self.threads * CHUNKS_PER_THREAD))
            entry = self._code.address(f"{each['kernel']}.task")
            self._tasks[row] = (entry, array_address(self._slots) + 8 * start, total, chunk)
        for place, arg in self._places:
            if "param" in arg:
                uses[arg["param"]].append(place)
            else:
                self._slots[place] = array_address(self._workspace) + arg["offset"]
        self._uses = [np.array(places, np.intp) for places in uses]
        self._alone = self.threads == 1 or max((math.prod(e["grid"]) for e in launches), default=0) < 2

    def _loops(self, plan: Mapping[str, Any]) -> NativePlanEngine:
        many = [math.prod(e["grid"]) > 1 and self.threads > 1 for e in plan["launches"]]

        def launch(first: int, last: int) -> None:
            self._launch(first, last, not any(many[first:last]))

        return NativePlanEngine(plan, self._slots, self._others, self._places, launch)

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
                self._slots[places] = encode_slot(p, a)
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
            ctypes.c_int64.from_address(self._code.variable(REPORT_CONTEXT)).value = self._reports.context


def encode_slot(parameter: PlanParameter, array: np.ndarray) -> int:
    """The eight bytes for a kernel: an address, or the scalar itself."""
    if not parameter.scalar:
        return array_address(array)
    return int.from_bytes(array.tobytes().ljust(8, b"\0"), "little", signed=True)
