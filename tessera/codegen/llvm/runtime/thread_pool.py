"""Thread pool: dynamic scheduling of programs in chunks, and cooperative launches with a grid barrier.

Every thread walks the same list of tasks. Of each it takes chunks of programs from a shared counter until none is left,
then waits until all are done, and goes on. A thread that starts late finds no chunk left and passes through; no Python
runs between two launches. When the stop word of the text says so, every thread leaves; after a launch in which a
program failed, none begins the next.

A cooperative launch has a thread for each program. Its barrier state holds the arrivals of the current round, the
number of the round, the programs that have ended, the address of the stop word of the text, the number of programs, and
whether the launch is abandoned, so that a program that has not begun does nothing.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cache
from threading import Thread, get_ident
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
import numpy as np

from tessera.codegen.llvm.runtime import interrupts
from tessera.codegen.llvm.runtime.jit import MachineCode, compile_once
from tessera.codegen.llvm.text.protocol import (
    BARRIER_BROKEN,
    BARRIER_CONTEXT,
    BARRIER_FUNCTION,
    FAILURE_WORD,
    FIRST_KEY,
    INTERRUPTED,
    NO_FAILURE,
    PENDING,
    POLL_FUNCTION,
)
from tessera.core.device import array_address
from tessera.core.errors import ArgumentError, BarrierError
from tessera.core.progress import CANCEL_TOKEN

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

# Launches on several threads: machine code that schedules programs, called once by each thread.


TASK_FIELDS = 4  # function, slots, number of programs, chunk
STATE_WORDS = 8  # a cache line: the next program, programs done, and in the first state the threads in machine code
USERS = 2
NOTHING_LEFT = 1 << 62  # of both counts
SPINS_BEFORE_YIELD = 2000  # reads of the counter before each `sched_yield`

CHECK_STOP = f"""
  %word = load atomic i64, ptr %word.p monotonic, align 8
  %stopped = icmp ult i64 %word, {FIRST_KEY}
  br i1 %stopped, label %leave, label %next
next:"""


def _make_worker(name: str, enter: str, start: str, take: str, finish: str, leave: str) -> str:
    """A function that runs tasks: `take` finds where the next chunk begins, `finish` follows each chunk."""
    return f"""
define void @{name}(ptr %tasks, i64 %count, ptr %states, ptr %scratch, ptr %word.p) {{
entry:{enter}
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
  %chunk = load i64, ptr %chunk.p{start}
  br label %take
take:{take}
  %some = icmp slt i64 %begin, %total
  br i1 %some, label %work, label %wait
work:
  %stop = add i64 %begin, %chunk
  %over = icmp sgt i64 %stop, %total
  %end = select i1 %over, i64 %total, i64 %stop
  call void %run(ptr %slots, i64 %begin, i64 %end, ptr %scratch){finish}
finished:
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %count
  %last = load atomic i64, ptr %word.p monotonic, align 8
  %whole = icmp uge i64 %last, {PENDING}
  %further = and i1 %more, %whole
  br i1 %further, label %task, label %leave
leave:{leave}
  ret void
}}
"""


SHARED_WORKER = _make_worker(
    "execute",
    enter=f"""
  %users = getelementptr i64, ptr %states, i64 {USERS}
  %entered = atomicrmw add ptr %users, i64 1 seq_cst""",
    start="""
  %next.p = getelementptr %state, ptr %states, i64 %i, i32 0
  %done.p = getelementptr %state, ptr %states, i64 %i, i32 1""",
    take=f"""{CHECK_STOP}
  %begin = atomicrmw add ptr %next.p, i64 %chunk monotonic""",
    finish=f"""
  %ran = sub i64 %end, %begin
  %before = atomicrmw add ptr %done.p, i64 %ran acq_rel
  br label %take
wait:
  %spin = phi i64 [ 0, %next ], [ %spin.next, %again ], [ 0, %rest ]
  %done = load atomic i64, ptr %done.p acquire, align 8
  %all = icmp sge i64 %done, %total
  br i1 %all, label %finished, label %again
again:
  %spin.next = add i64 %spin, 1
  %tired = icmp sgt i64 %spin.next, {SPINS_BEFORE_YIELD}
  br i1 %tired, label %yield, label %wait
yield:
  %ignored = call i32 @sched_yield()
  call void @{POLL_FUNCTION}(ptr %word.p)
  %now = load atomic i64, ptr %word.p monotonic, align 8
  %ended = icmp ult i64 %now, {FIRST_KEY}
  br i1 %ended, label %leave, label %rest
rest:
  br label %wait""",
    leave="""
  %left = atomicrmw sub ptr %users, i64 1 seq_cst""",
)
# The same on one thread, which needs no states.
SERIAL_WORKER = _make_worker(
    "execute_serial",
    enter="",
    start="",
    take=f"""
  %begin = phi i64 [ 0, %task ], [ %stop, %work ]{CHECK_STOP}""",
    finish="""
  br label %take
wait:
  br label %finished""",
    leave="",
)
WORKER_TEXT = f"""
%task = type {{ ptr, ptr, i64, i64 }}
%state = type {{ i64, i64, [48 x i8] }}
declare i32 @sched_yield()
declare void @{POLL_FUNCTION}(ptr)
{SHARED_WORKER}{SERIAL_WORKER}"""


@compile_once
def _compile_worker() -> MachineCode:
    interrupts.register_poll_symbol()
    return MachineCode(WORKER_TEXT)


@cache
def get_worker_entry() -> tuple[ctypes._FuncPointer, int]:  # type: ignore[name-defined]
    """The machine code that a thread runs, and its address; the interpreter lock is released meanwhile."""
    pointer, place = ctypes.c_void_p, _compile_worker().address("execute")
    return ctypes.CFUNCTYPE(None, pointer, ctypes.c_int64, pointer, pointer, pointer)(place), place


@cache
def get_serial_address() -> int:
    """The address of the machine code that runs tasks on one thread."""
    return _compile_worker().address("execute_serial")


@cache
def get_helper_threads(count: int) -> ThreadPoolExecutor:
    """Threads besides the caller's, kept between calls."""
    from concurrent.futures import ThreadPoolExecutor  # not needed to load a program

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


class StopWord:
    """The stop word of a text. A thread that starts late reads it, so it keeps the machine code in memory."""

    def __init__(self, code: MachineCode) -> None:
        self._code = code
        place = code.find_variable(FAILURE_WORD)  # 0 in the text of an artifact that an earlier version built
        self._word = ctypes.c_int64.from_address(place) if place else ctypes.c_int64()
        self.address = ctypes.addressof(self._word)

    @property
    def value(self) -> int:
        """What the word holds: NO_FAILURE, INTERRUPTED, BARRIER_BROKEN, or the key of a failure."""
        return self._word.value

    @value.setter
    def value(self, number: int) -> None:
        self._word.value = number

    def interrupt(self) -> None:
        """End every program of the launch."""
        self._word.value = INTERRUPTED

    def cancellable(self) -> AbstractContextManager[None]:
        """A context of a launch that the thread's token, if it has one, cancels."""
        token = CANCEL_TOKEN.get()
        return nullcontext() if token is None else token.running(self.interrupt)


class WorkerPool:
    """A number of threads, each with its own scratch memory; `stop` is the stop word of the text that they run."""

    def __init__(self, threads: int, scratch: int, stop: StopWord) -> None:
        self.threads, self._stop = threads, stop
        self._arenas = [allocate_aligned(scratch) for _ in range(threads)]
        self._addresses = [array_address(a) for a in self._arenas]

    @property
    def scratch(self) -> int:
        """The address of the scratch memory of the calling thread."""
        return self._addresses[0]

    def run(self, tasks: np.ndarray, serial: bool) -> None:
        """Run every task; `serial`: on the calling thread, for work too small to share.

        Raises:
            KeyboardInterrupt: the handler of a signal raised it (or another exception); no thread uses the tasks.
        """
        # a new array for each run: a late thread may still read the old one
        states = np.zeros((max(1, len(tasks)), STATE_WORDS), np.int64)
        run, entry = get_worker_entry()
        arguments = (array_address(tasks), len(tasks), array_address(states), self._addresses[0], self._stop.address)
        try:
            if not serial:
                for arena in self._addresses[1:]:
                    if len(_QUEUED) >= MAX_QUEUED:  # other callers have all helpers
                        break
                    _QUEUED.append(None)
                    get_helper_threads(self.threads - 1).submit(_run_helper, run, tasks, states, arena, self._stop)
            if get_ident() == interrupts.MainThread.number:  # the one that runs signal handlers
                interrupts.get_interruptible_entry()(entry, *arguments)
            else:
                with self._stop.cancellable():
                    run(*arguments)
        except BaseException:  # a signal while Python started the threads
            self._expel_helpers(states)
            raise
        if self._stop.value == INTERRUPTED:
            self._expel_helpers(states)
            interrupts.raise_interrupt()
        if self._stop.value != NO_FAILURE:  # tasks remain; a late helper must not run them once the word is reset
            states[:, :USERS] = NOTHING_LEFT

    def _expel_helpers(self, states: np.ndarray) -> None:
        """Wait until no thread is in machine code of this run; one that starts later finds nothing to do."""
        self._stop.value = INTERRUPTED
        states[:, :USERS] = NOTHING_LEFT
        wait_for(lambda: not states[0, USERS])


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for threads that are about to leave; a signal does not end the wait."""
    while not condition():
        try:
            time.sleep(1e-3)
        except KeyboardInterrupt:  # one was raised before, which the caller passes on
            continue


# One entry for each job that no helper has begun. Many callers on a busy machine would queue more and more jobs that
# find nothing to do once they begin, and keep their arrays meanwhile.
_QUEUED: deque[None] = deque()
MAX_QUEUED = 64


def _run_helper(run: Callable[..., None], tasks: np.ndarray, states: np.ndarray, arena: int, stop: StopWord) -> None:
    _QUEUED.pop()
    run(array_address(tasks), len(tasks), array_address(states), arena, stop.address)


# A replacement of the allocator of scratch arenas and workspaces (tessera/codegen/llvm/runtime/guards.py).
ALLOCATOR: ContextVar[Callable[[int], np.ndarray] | None] = ContextVar("allocator", default=None)


def allocate_aligned(count: int, to: int = 64) -> np.ndarray:
    """Bytes that begin at a multiple of `to`."""
    allocate = ALLOCATOR.get()
    if allocate is not None:
        return allocate(count)
    raw = np.empty(count + to, np.uint8)
    start = -array_address(raw) % to
    return raw[start : start + count]


# Cooperative launches: a thread for each program, and the machine code of the grid barrier.


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
