"""Cooperative launches: a thread for each program, which synchronise at a grid barrier.

The barrier state of a launch holds the arrivals of the current round, the
number of the round, the programs that have ended, the address of the stop word of the text, the number of programs, and
whether the launch is abandoned, so that a program that has not begun does nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from functools import cache
from threading import Thread
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from tessera.codegen.llvm.runtime import interrupts
from tessera.codegen.llvm.runtime.jit import MachineCode, compile_once
from tessera.codegen.llvm.runtime.thread_pool import StopWord, allocate_aligned, wait_for
from tessera.codegen.llvm.text.protocol import (
    BARRIER_BROKEN,
    BARRIER_CONTEXT,
    BARRIER_FUNCTION,
    FIRST_KEY,
    INTERRUPTED,
)
from tessera.core.device import array_address
from tessera.core.errors import BarrierError

BARRIER_STATE_WORDS = 6
ARRIVED, ROUND, ENDED, STOP_ADDRESS, PROGRAMS, ABANDONED = range(BARRIER_STATE_WORDS)
BARRIER_TEXT = f"""
declare i32 @sched_yield()

define void @{BARRIER_FUNCTION}(i64 %context) {{
entry:
  %state = inttoptr i64 %context to ptr
  %round.p = getelementptr i64, ptr %state, i64 {ROUND}
  %ended.p = getelementptr i64, ptr %state, i64 {ENDED}
  %own.p = getelementptr i64, ptr %state, i64 {STOP_ADDRESS}
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
  br i1 %lost, label %parted, label %ask
ask:
  %own = load ptr, ptr %own.p
  %word = load atomic i64, ptr %own monotonic, align 8
  %stopped = icmp ult i64 %word, {FIRST_KEY}
  br i1 %stopped, label %leave, label %rest
rest:
  %more = call i32 @sched_yield()
  br label %wait
parted:
  %broken = load ptr, ptr %own.p
  %least = atomicrmw umin ptr %broken, i64 {BARRIER_BROKEN} acq_rel
  ret void
leave:
  ret void
}}

define void @tessera_program(ptr %run, ptr %slots, i64 %program, ptr %scratch, ptr %state) {{
  %abandoned.p = getelementptr i64, ptr %state, i64 {ABANDONED}
  %abandoned = load atomic i64, ptr %abandoned.p acquire, align 8
  %none = icmp ne i64 %abandoned, 0
  br i1 %none, label %leave, label %begin
begin:
  %next = add i64 %program, 1
  call void %run(ptr %slots, i64 %program, i64 %next, ptr %scratch)
  %ended.p = getelementptr i64, ptr %state, i64 {ENDED}
  %ignored = atomicrmw add ptr %ended.p, i64 1 acq_rel
  br label %leave
leave:
  ret void
}}
"""


class CooperativeLaunches:
    """The cooperative launches of one artifact."""

    def __init__(self, plan: Mapping[str, Any], code: MachineCode, stop: StopWord) -> None:
        names = set(plan.get("meeting", ()))
        self.names = {row: e["kernel"] for row, e in enumerate(plan["launches"]) if e["kernel"] in names}
        self._scratch = {row: plan["scratch"][name] for row, name in self.names.items()}
        self._stop = stop
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

    def run(self, row: int, task: np.ndarray) -> None:
        """Run a launch with a thread for each program.

        Raises:
            BarrierError: a barrier could not complete.
            KeyboardInterrupt: a signal handler raised it, or another exception; every thread has left.
        """
        entry, slots, total = (int(n) for n in task[:3])
        arenas = [allocate_aligned(self._scratch[row]) for _ in range(total)]
        state = np.zeros(BARRIER_STATE_WORDS, np.int64)
        state[STOP_ADDRESS], state[PROGRAMS] = self._stop.address, total
        self._context_word.value = array_address(state)
        threads = [
            Thread(target=_run_program, args=(entry, slots, i, arenas[i], state), name=f"tessera-program-{i}")
            for i in range(total)
        ]
        try:
            for thread in threads:
                thread.start()
            with self._stop.cancellable():
                for thread in threads:
                    thread.join()
        except BaseException:
            state[ABANDONED], self._stop.value = 1, INTERRUPTED
            wait_for(lambda: not any(thread.is_alive() for thread in threads))
            raise
        if self._stop.value == INTERRUPTED:
            interrupts.raise_interrupt()
        if self._stop.value == BARRIER_BROKEN:
            raise self._make_barrier_error(row, total)

    def _make_barrier_error(self, row: int, total: int) -> BarrierError:
        return BarrierError(
            f"some programs of {self.names[row]} wait at a grid barrier, and others have ended",
            expected=f"all {total} programs of the launch at the same barrier",
            suggestion="move it out of the `if` or loop whose condition differs between programs; the interpreter "
            "names the programs that diverge",
        )  # fmt: skip


def _run_program(entry: int, slots: int, program: int, arena: np.ndarray, state: np.ndarray) -> None:
    _get_program_entry()(entry, slots, program, array_address(arena), array_address(state))


@compile_once
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
