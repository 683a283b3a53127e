"""Running launches on several threads: machine code that shares out programs, called once by each thread.

Every thread walks the same list of tasks. Of each it takes chunks of programs from a shared counter
until none is left, then waits until all are done, and goes on. A thread that comes late finds nothing
left and passes through, so that nobody waits for it; no Python runs between two launches.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from tessera.codegen.llvm.jit import Code
from tessera.errors import ArgumentError

FIELDS = 4  # of a task: function, slots, number of programs, chunk
SPINS = 2000  # looks at the counter between two offers to let other threads run

TEXT = f"""
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
  %tired = icmp sgt i64 %spin.next, {SPINS}
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
def _code() -> Code:
    return Code(TEXT)


@cache
def execute() -> ctypes._FuncPointer:  # type: ignore[name-defined]
    """The machine code that a thread runs; Python's lock is released while it does."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    return function(_code().address("execute"))


@cache
def helpers(count: int) -> ThreadPoolExecutor:
    """Threads besides the caller's, kept between calls."""
    return ThreadPoolExecutor(count, thread_name_prefix="tessera")


def thread_count(given: int | None = None) -> int:
    """How many threads to run on: as given, or TESSERA_THREADS, or one for each processor it may use.

    Raises:
        ArgumentError: TESSERA_THREADS is not a positive number.
    """
    text = os.environ.get("TESSERA_THREADS") if given is None else str(given)
    if not text:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise ArgumentError("the number of threads is not a positive number", received=text, expected="1, 2, ...")
    return int(text)


class Crew:
    """A number of threads, each with its own scratch memory."""

    def __init__(self, threads: int, scratch: int) -> None:
        self.threads = threads
        self._arenas = [aligned(scratch) for _ in range(threads)]
        self._addresses = [address(a) for a in self._arenas]

    def run(self, tasks: np.ndarray, alone: bool) -> None:
        """Run every task; `alone` for work too small to share."""
        states = np.zeros((len(tasks), 8), np.int64)  # its own for each run: a late thread may still look at it
        run, place, count = execute(), address(tasks), len(tasks)
        if not alone:
            for arena in self._addresses[1:]:
                helpers(self.threads - 1).submit(_help, run, tasks, states, arena)
        run(place, count, address(states), self._addresses[0])


def _help(run: ctypes._FuncPointer, tasks: np.ndarray, states: np.ndarray, arena: int) -> None:  # type: ignore[name-defined]
    run(address(tasks), len(tasks), address(states), arena)


def aligned(count: int, to: int = 64) -> np.ndarray:
    """Bytes that begin at a multiple of `to`."""
    raw = np.empty(count + to, np.uint8)
    start = -address(raw) % to
    return raw[start : start + count]


def address(array: np.ndarray) -> int:
    """Where an array's elements begin."""
    return array.__array_interface__["data"][0]
