"""Launches whose programs wait for each other: a thread for each program, and the machine code at which they meet.

A meeting's state is four words: how many have come to the round under way, the number of the round, how many programs
have ended, and the address of the text's own word, which is made negative where a round can no longer be full.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from functools import cache
from threading import Thread
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from tessera.codegen.llvm.jit import Code
from tessera.codegen.llvm.meeting import CONTEXT, NAME
from tessera.codegen.llvm.pool import address, aligned
from tessera.errors import BarrierError

WORDS = 5
CAME, ROUND, ENDED, OWN, PROGRAMS = range(WORDS)
TEXT = f"""
declare i32 @sched_yield()

define void @{NAME}(i64 %context) {{
entry:
  %state = inttoptr i64 %context to ptr
  %round.p = getelementptr i64, ptr %state, i64 {ROUND}
  %ended.p = getelementptr i64, ptr %state, i64 {ENDED}
  %own.p = getelementptr i64, ptr %state, i64 {OWN}
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
  ; whoever has ended is looked at first: it may have passed the round that is looked at then
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


class Meetings:
    """The launches of one artifact that meet."""

    def __init__(self, plan: Mapping[str, Any], code: Code) -> None:
        names = set(plan.get("meeting", ()))
        self._names = {row: e["kernel"] for row, e in enumerate(plan["launches"]) if e["kernel"] in names}
        self._scratch = {row: plan["scratch"][name] for row, name in self._names.items()}
        if names:
            self._own = ctypes.c_int64.from_address(code.variable(CONTEXT))

    def parts(self, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
        """Launches from `first` to before `last`, in stretches that need no meeting, and singly those that do."""
        start = first
        for row in (r for r in sorted(self._scratch) if first <= r < last):
            if row > start:
                yield start, row, False
            yield row, row + 1, True
            start = row + 1
        if last > start:
            yield start, last, False

    def run(self, row: int, task: np.ndarray) -> BarrierError | None:
        """Run a launch, each program in a thread of its own; what went wrong, if anything."""
        entry, slots, total = (int(n) for n in task[:3])
        arenas = [aligned(self._scratch[row]) for _ in range(total)]
        state = np.zeros(WORDS, np.int64)
        state[OWN], state[PROGRAMS] = ctypes.addressof(self._own), total
        self._own.value = address(state)
        run = _program()
        threads = [
            Thread(target=run, args=(entry, slots, i, address(arenas[i]), address(state)), name=f"tessera-program-{i}")
            for i in range(total)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._error(row, total) if self._own.value < 0 else None

    def _error(self, row: int, total: int) -> BarrierError:
        return BarrierError(
            f"some programs of {self._names[row]} wait at a grid barrier, and others have ended",
            expected=f"all {total} programs of the launch at the same barrier",
            suggestion="move it out of the `if` or loop whose condition differs between programs; the interpreter says "
            "which programs part",
        )  # fmt: skip


@cache
def _code() -> Code:
    return Code(TEXT)


@cache
def _program() -> ctypes._FuncPointer:  # type: ignore[name-defined]
    """The machine code of a thread: Python's lock is released while it runs."""
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    return ctypes.CFUNCTYPE(None, *kinds)(_code().address("tessera_program"))


@cache
def offer() -> None:
    """Let machine code find the function at which programs meet."""
    llvm.add_symbol(NAME, _code().address(NAME))
