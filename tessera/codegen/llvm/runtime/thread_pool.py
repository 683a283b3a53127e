"""Thread pool: dynamic scheduling of programs in chunks, and cooperative launches with a grid barrier.

Every thread walks the same list of tasks. Of each it takes chunks of programs from a shared counter until none is left,
then waits until all are done, and goes on. A thread that starts late finds no chunk left and passes through; no Python
runs between two launches.

A cooperative launch has a thread for each program. Its barrier state holds the arrivals of the current round, the
number of the round, the programs that have ended, the address of the context word of the text, and the number of
programs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Thread
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from tessera.codegen.llvm.runtime.jit import MachineCode
from tessera.codegen.llvm.table.program_ops import BARRIER_CONTEXT, BARRIER_FUNCTION
from tessera.core.device import array_address
from tessera.core.errors import ArgumentError, BarrierError

# Launches on several threads: machine code that schedules programs, called once by each thread.


TASK_FIELDS = 4  # function, slots, number of programs, chunk
SPINS_BEFORE_YIELD = 2000  # reads of the counter before each `sched_yield`

WORKER_TEXT = f"""
%task = type {{ ptr, ptr, i64, i64 }}
%state = type {{ i64, i64, [48 x i8] }}
declare i32 @sched_yield()

define void @execute(ptr %tasks, i64 %count, ptr %states, ptr %scratch) {{
entry:
  %any = icmp sgt i64 %count, 0
  br i1 %any, label %task, label %leave
task:
  %i = phi i64 [ 0, %entry ], [ %i.next, %finished ]
  %t = getelementptr %task, ptr %tasks, i64 %i
  %slots.p = getelementptr %task, ptr %t, i64 0, i32 1
  %total.p = getelementptr %task, ptr %t, i64 0, i32 2
  %chunk.p = getelementptr %task, ptr %t, i64 0, i32 3
  %run = load ptr, ptr %t
  %slots = load ptr, ptr %slots.p
  %total = load i64, ptr %total.p
  %chunk = load i64, ptr %chunk.p
  %next.p = getelementptr %state, ptr %states, i64 %i, i32 0
  %done.p = getelementptr %state, ptr %states, i64 %i, i32 1
  br label %take
take:
  %begin = atomicrmw add ptr %next.p, i64 %chunk monotonic
  %some = icmp slt i64 %begin, %total
  br i1 %some, label %work, label %wait
work:
  %stop = add i64 %begin, %chunk
  %over = icmp sgt i64 %stop, %total
  %end = select i1 %over, i64 %total, i64 %stop
  call void %run(ptr %slots, i64 %begin, i64 %end, ptr %scratch)
  %ran = sub i64 %end, %begin
  %before = atomicrmw add ptr %done.p, i64 %ran acq_rel
  br label %take
wait:
  %spin = phi i64 [ 0, %take ], [ %spin.next, %again ], [ 0, %yield ]
  %done = load atomic i64, ptr %done.p acquire, align 8
  %all = icmp sge i64 %done, %total
  br i1 %all, label %finished, label %again
again:
  %spin.next = add i64 %spin, 1
  %tired = icmp sgt i64 %spin.next, {SPINS_BEFORE_YIELD}
  br i1 %tired, label %yield, label %wait
yield:
  %ignored = call i32 @sched_yield()
  br label %wait
finished:
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %count
  br i1 %more, label %task, label %leave
leave:
  ret void
}}
"""


@cache
def _compile_worker() -> MachineCode:
    return MachineCode(WORKER_TEXT)


@cache
def get_worker_entry() -> ctypes._FuncPointer:  # type: ignore[name-defined]
    """The machine code that a thread runs; the interpreter lock is released meanwhile."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    return function(_compile_worker().address("execute"))


@cache
def get_helper_threads(count: int) -> ThreadPoolExecutor:
    """Threads besides the caller's, kept between calls."""
    return ThreadPoolExecutor(count, thread_name_prefix="tessera")


def choose_thread_count(given: int | None = None) -> int:
    """The number of threads: the argument, else TESSERA_THREADS, else the number of available processors.

    Raises:
        ArgumentError: TESSERA_THREADS is not a positive number.
    """
    text = os.environ.get("TESSERA_THREADS") if given is None else str(given)
    if not text:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise ArgumentError("the number of threads is not a positive number", received=text, expected="1, 2, ...")
    return int(text)


class WorkerPool:
    """A number of threads, each with its own scratch memory."""

    def __init__(self, threads: int, scratch: int) -> None:
        self.threads = threads
        self._arenas = [allocate_aligned(scratch) for _ in range(threads)]
        self._addresses = [array_address(a) for a in self._arenas]

    def run(self, tasks: np.ndarray, serial: bool) -> None:
        """Run every task; `serial`: on the calling thread, for work too small to share."""
        # a new array for each run: a late thread may still read the old one
        states = np.zeros((len(tasks), 8), np.int64)
        run, place, count = get_worker_entry(), array_address(tasks), len(tasks)
        if not serial:
            for arena in self._addresses[1:]:
                get_helper_threads(self.threads - 1).submit(_run_helper, run, tasks, states, arena)
        run(place, count, array_address(states), self._addresses[0])


def _run_helper(run: ctypes._FuncPointer, tasks: np.ndarray, states: np.ndarray, arena: int) -> None:  # type: ignore[name-defined]
    run(array_address(tasks), len(tasks), array_address(states), arena)


def allocate_aligned(count: int, to: int = 64) -> np.ndarray:
    """Bytes that begin at a multiple of `to`."""
    raw = np.empty(count + to, np.uint8)
    start = -array_address(raw) % to
    return raw[start : start + count]


# Cooperative launches: a thread for each program, and the machine code of the grid barrier.


BARRIER_STATE_WORDS = 5
ARRIVED, ROUND, ENDED, CONTEXT_ADDRESS, PROGRAMS = range(BARRIER_STATE_WORDS)
BARRIER_TEXT = f"""
declare i32 @sched_yield()

define void @{BARRIER_FUNCTION}(i64 %context) {{
entry:
  %state = inttoptr i64 %context to ptr
  %round.p = getelementptr i64, ptr %state, i64 {ROUND}
  %ended.p = getelementptr i64, ptr %state, i64 {ENDED}
  %own.p = getelementptr i64, ptr %state, i64 {CONTEXT_ADDRESS}
  %programs.p = getelementptr i64, ptr %state, i64 {PROGRAMS}
  %programs = load i64, ptr %programs.p
  %round = load atomic i64, ptr %round.p acquire, align 8
  %before = atomicrmw add ptr %state, i64 1 acq_rel
  %came = add i64 %before, 1
  %last = icmp eq i64 %came, %programs
  br i1 %last, label %open, label %wait
open:
  store atomic i64 0, ptr %state release, align 8
  %ignored = atomicrmw add ptr %round.p, i64 1 acq_rel
  ret void
wait:
  ; the ended count is read first: a program that ends later has passed the round that is read next
  %ended = load atomic i64, ptr %ended.p acquire, align 8
  %now = load atomic i64, ptr %round.p acquire, align 8
  %met = icmp ne i64 %now, %round
  br i1 %met, label %leave, label %look
look:
  %lost = icmp sgt i64 %ended, 0
  br i1 %lost, label %parted, label %rest
rest:
  %more = call i32 @sched_yield()
  br label %wait
parted:
  %own = load ptr, ptr %own.p
  store atomic i64 -1, ptr %own release, align 8
  ret void
leave:
  ret void
}}

define void @tessera_program(ptr %run, ptr %slots, i64 %program, ptr %scratch, ptr %state) {{
  %next = add i64 %program, 1
  call void %run(ptr %slots, i64 %program, i64 %next, ptr %scratch)
  %ended.p = getelementptr i64, ptr %state, i64 {ENDED}
  %ignored = atomicrmw add ptr %ended.p, i64 1 acq_rel
  ret void
}}
"""


class CooperativeLaunches:
    """The cooperative launches of one artifact."""

    def __init__(self, plan: Mapping[str, Any], code: MachineCode) -> None:
        names = set(plan.get("meeting", ()))
        self._names = {row: e["kernel"] for row, e in enumerate(plan["launches"]) if e["kernel"] in names}
        self._scratch = {row: plan["scratch"][name] for row, name in self._names.items()}
        if names:
            self._context_word = ctypes.c_int64.from_address(code.variable(BARRIER_CONTEXT))

    def split(self, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
        """Launches from `first` to before `last` as runs (first, last, cooperative); a cooperative launch is a run."""
        start = first
        for row in (r for r in sorted(self._scratch) if first <= r < last):
            if row > start:
                yield start, row, False
            yield row, row + 1, True
            start = row + 1
        if last > start:
            yield start, last, False

    def run(self, row: int, task: np.ndarray) -> BarrierError | None:
        """Run a launch with a thread for each program; the error, if a barrier could not complete."""
        entry, slots, total = (int(n) for n in task[:3])
        arenas = [allocate_aligned(self._scratch[row]) for _ in range(total)]
        state = np.zeros(BARRIER_STATE_WORDS, np.int64)
        state[CONTEXT_ADDRESS], state[PROGRAMS] = ctypes.addressof(self._context_word), total
        self._context_word.value = array_address(state)
        run = _get_program_entry()
        threads = [
            Thread(
                target=run,
                args=(entry, slots, i, array_address(arenas[i]), array_address(state)),
                name=f"tessera-program-{i}",
            )
            for i in range(total)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._make_barrier_error(row, total) if self._context_word.value < 0 else None

    def _make_barrier_error(self, row: int, total: int) -> BarrierError:
        return BarrierError(
            f"some programs of {self._names[row]} wait at a grid barrier, and others have ended",
            expected=f"all {total} programs of the launch at the same barrier",
            suggestion="move it out of the `if` or loop whose condition differs between programs; the interpreter "
            "names the programs that diverge",
        )  # fmt: skip


@cache
def _compile_barrier() -> MachineCode:
    return MachineCode(BARRIER_TEXT)


@cache
def _get_program_entry() -> ctypes._FuncPointer:  # type: ignore[name-defined]
    """The machine code of a program's thread; the interpreter lock is released while it runs."""
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    return ctypes.CFUNCTYPE(None, *kinds)(_compile_barrier().address("tessera_program"))


@cache
def register_barrier_symbol() -> None:
    """Give machine code the address of the barrier function."""
    llvm.add_symbol(BARRIER_FUNCTION, _compile_barrier().address(BARRIER_FUNCTION))
