"""Thread pool: dynamic scheduling of programs in chunks.

Every thread walks the same list of tasks. Of each it takes chunks of programs from a shared counter until none is left,
then waits until all are done, and goes on. A thread that starts late finds no chunk left and passes through; no Python
runs between two launches. When the stop word of the text says so, every thread leaves; after a launch in which a
program failed, none begins the next.

Helper threads wait in machine code, each at a mailbox: a word that is 0, or the address of a job and whether the helper
has begun it. A caller posts its job in the mailboxes that are empty, works, and takes back what no helper has begun; it
returns when no helper is in its job. A helper that has nothing to do looks at its mailbox for a moment, then sleeps; a
short job does not wake it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cache
from threading import get_ident

import numpy as np

from tessera.codegen.llvm.runtime import interrupts
from tessera.codegen.llvm.runtime.jit import MachineCode, compile_once
from tessera.codegen.llvm.text.protocol import (
    FAILURE_WORD,
    FIRST_KEY,
    INTERRUPTED,
    PENDING,
    POLL_FUNCTION,
)
from tessera.core.device import array_address
from tessera.core.errors import ArgumentError
from tessera.core.progress import CANCEL_TOKEN

# Launches on several threads: machine code that schedules programs, called once by each thread.


TASK_FIELDS = 4  # function, slots, number of programs, chunk
LINE_WORDS = 8  # of a cache line: a job's fields, then for each task the next program and the programs done
MAX_HELPERS = 255
SPINS_BEFORE_YIELD = 2000  # reads of the counter before each `sched_yield`
POSTED, RUNNING, STATES = 2, 3, 3  # in a mailbox beside the address of a job, and their bits
WAKE_NANOSECONDS = 100_000  # of the last run of a job from which on it wakes helpers that sleep: that takes up to 40 µs
BURST_NANOSECONDS = 10_000  # the same for a job that soon follows another: a helper that woke would not sleep between
LONG_JOB = 1 << 62  # nanoseconds of the last run of a job that was not run before, or that always wakes helpers
LEAVE = POSTED  # without a job: the helper ends
SPIN_NANOSECONDS = 100_000  # that a helper looks at its mailbox before it sleeps
POST_BYTES = 320  # of a mailbox: word, whether its helper sleeps, what came of its thread, thread, mutex, condition
STARTING, STARTED, CLOSED = 1, 2, 3  # what came of a helper's thread; 0: none has been asked for
LOOKS = 64  # at the mailbox between two readings of the clock

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
    enter="",
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
    leave="",
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
# A job: tasks, their number, the stop word, the scratch memory of each thread, the helpers, the nanoseconds of its last
# run, and LONG_JOB where these do not tell those of the next one, else 0; the states follow.
JOB_TEXT = f"""
%job = type {{ ptr, i64, ptr, ptr, i64, i64, i64, [8 x i8] }}
%post = type {{ i64, i64, i64, ptr, [32 x i8], [128 x i8], [{POST_BYTES - 192} x i8] }}
@posts = global [{MAX_HELPERS} x %post] zeroinitializer, align 64
@spin = global i64 0
@ended = global i64 0
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_join(ptr, ptr)
declare i32 @pthread_mutex_init(ptr, ptr)
declare i32 @pthread_mutex_lock(ptr)
declare i32 @pthread_mutex_unlock(ptr)
declare i32 @pthread_cond_init(ptr, ptr)
declare i32 @pthread_cond_wait(ptr, ptr)
declare i32 @pthread_cond_signal(ptr)
declare i32 @clock_gettime(i32, ptr)

define internal i64 @nanoseconds(ptr %now) {{
  %ignored = call i32 @clock_gettime(i32 {time.CLOCK_MONOTONIC}, ptr %now)
  %seconds = load i64, ptr %now
  %rest.p = getelementptr i64, ptr %now, i64 1
  %rest = load i64, ptr %rest.p
  %whole = mul i64 %seconds, 1000000000
  %all = add i64 %whole, %rest
  ret i64 %all
}}

define internal void @wake(ptr %post) {{
  %suspended.p = getelementptr %post, ptr %post, i64 0, i32 1
  %suspended = load atomic i64, ptr %suspended.p seq_cst, align 8
  %waits = icmp ne i64 %suspended, 0
  br i1 %waits, label %signal, label %leave
signal:
  %mutex = getelementptr %post, ptr %post, i64 0, i32 5
  %condition = getelementptr %post, ptr %post, i64 0, i32 6
  %locked = call i32 @pthread_mutex_lock(ptr %mutex)
  %signalled = call i32 @pthread_cond_signal(ptr %condition)
  %unlocked = call i32 @pthread_mutex_unlock(ptr %mutex)
  br label %leave
leave:
  ret void
}}

define internal void @sleep(ptr %post) {{
entry:
  %suspended = getelementptr %post, ptr %post, i64 0, i32 1
  %mutex = getelementptr %post, ptr %post, i64 0, i32 5
  %condition = getelementptr %post, ptr %post, i64 0, i32 6
  %locked = call i32 @pthread_mutex_lock(ptr %mutex)
  store atomic i64 1, ptr %suspended seq_cst, align 8
  br label %ask
ask:
  %word = load atomic i64, ptr %post seq_cst, align 8
  %empty = icmp eq i64 %word, 0
  br i1 %empty, label %doze, label %up
doze:
  %woken = call i32 @pthread_cond_wait(ptr %condition, ptr %mutex)
  br label %ask
up:
  store atomic i64 0, ptr %suspended seq_cst, align 8
  %unlocked = call i32 @pthread_mutex_unlock(ptr %mutex)
  ret void
}}

define internal ptr @help(ptr %given) {{
entry:
  %now = alloca [2 x i64]
  %number = ptrtoint ptr %given to i64
  %post = getelementptr [{MAX_HELPERS} x %post], ptr @posts, i64 0, i64 %number
  br label %rest
rest:
  %start = call i64 @nanoseconds(ptr %now)
  %most = load atomic i64, ptr @spin monotonic, align 8
  br label %look
look:
  %i = phi i64 [ 0, %rest ], [ %i.next, %again ], [ 0, %clock ]
  %word = load atomic i64, ptr %post acquire, align 8
  %empty = icmp eq i64 %word, 0
  br i1 %empty, label %again, label %take
again:
  %i.next = add i64 %i, 1
  %enough = icmp eq i64 %i.next, {LOOKS}
  br i1 %enough, label %clock, label %look
clock:
  %time = call i64 @nanoseconds(ptr %now)
  %spun = sub i64 %time, %start
  %late = icmp sgt i64 %spun, %most
  br i1 %late, label %sleep, label %look
sleep:
  call void @sleep(ptr %post)
  br label %rest
take:
  %last = icmp eq i64 %word, {LEAVE}
  br i1 %last, label %leave, label %begin
begin:
  %begun = or i64 %word, {RUNNING}
  %pair = cmpxchg ptr %post, i64 %word, i64 %begun acq_rel monotonic
  %own = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %own, label %work, label %rest
work:
  %address = and i64 %word, {~STATES}
  %job = inttoptr i64 %address to ptr
  %tasks = load ptr, ptr %job
  %count.p = getelementptr %job, ptr %job, i64 0, i32 1
  %count = load i64, ptr %count.p
  %word.pp = getelementptr %job, ptr %job, i64 0, i32 2
  %word.p = load ptr, ptr %word.pp
  %arenas.p = getelementptr %job, ptr %job, i64 0, i32 3
  %arenas = load ptr, ptr %arenas.p
  %arena = add i64 %number, 1
  %scratch.p = getelementptr ptr, ptr %arenas, i64 %arena
  %scratch = load ptr, ptr %scratch.p
  %states = getelementptr %job, ptr %job, i64 1
  call void @execute(ptr %tasks, i64 %count, ptr %states, ptr %scratch, ptr %word.p)
  store atomic i64 0, ptr %post release, align 8
  br label %rest
leave:
  ret ptr null
}}

define internal void @start(i64 %number) {{
entry:
  %post = getelementptr [{MAX_HELPERS} x %post], ptr @posts, i64 0, i64 %number
  %started.p = getelementptr %post, ptr %post, i64 0, i32 2
  %pair = cmpxchg ptr %started.p, i64 0, i64 {STARTING} acq_rel monotonic
  %own = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %own, label %make, label %leave
make:
  %thread = getelementptr %post, ptr %post, i64 0, i32 3
  %mutex = getelementptr %post, ptr %post, i64 0, i32 5
  %condition = getelementptr %post, ptr %post, i64 0, i32 6
  %made.mutex = call i32 @pthread_mutex_init(ptr %mutex, ptr null)
  %made.condition = call i32 @pthread_cond_init(ptr %condition, ptr null)
  %given = inttoptr i64 %number to ptr
  %failed = call i32 @pthread_create(ptr %thread, ptr null, ptr @help, ptr %given)
  %fine = icmp eq i32 %failed, 0
  %state = select i1 %fine, i64 {STARTED}, i64 0
  store atomic i64 %state, ptr %started.p release, align 8
  br label %leave
leave:
  ret void
}}

define void @close(i64 %number) {{
entry:
  %post = getelementptr [{MAX_HELPERS} x %post], ptr @posts, i64 0, i64 %number
  %started.p = getelementptr %post, ptr %post, i64 0, i32 2
  br label %ask
ask:
  %pair = cmpxchg ptr %started.p, i64 0, i64 {CLOSED} acq_rel acquire
  %found = extractvalue {{ i64, i1 }} %pair, 0
  switch i64 %found, label %leave [ i64 {STARTING}, label %soon
                                    i64 {STARTED}, label %dismiss ]
soon:
  %ignored = call i32 @sched_yield()
  br label %ask
dismiss:
  %told = cmpxchg ptr %post, i64 0, i64 {LEAVE} seq_cst monotonic
  %free = extractvalue {{ i64, i1 }} %told, 1
  br i1 %free, label %join, label %busy
busy:
  %yielded = call i32 @sched_yield()
  br label %dismiss
join:
  call void @wake(ptr %post)
  %thread.p = getelementptr %post, ptr %post, i64 0, i32 3
  %thread = load ptr, ptr %thread.p
  %joined = call i32 @pthread_join(ptr %thread, ptr null)
  store atomic i64 {CLOSED}, ptr %started.p release, align 8
  br label %leave
leave:
  ret void
}}

define void @execute_together(ptr %tasks, i64 %count, ptr %job, ptr %scratch, ptr %word.p) {{
entry:
  store ptr %tasks, ptr %job
  %count.p = getelementptr %job, ptr %job, i64 0, i32 1
  store i64 %count, ptr %count.p
  %helpers.p = getelementptr %job, ptr %job, i64 0, i32 4
  %helpers = load i64, ptr %helpers.p
  %last.p = getelementptr %job, ptr %job, i64 0, i32 5
  %last = load i64, ptr %last.p
  %now = alloca [2 x i64]
  %began = call i64 @nanoseconds(ptr %now)
  %before = load atomic i64, ptr @ended monotonic, align 8
  %gap = sub i64 %began, %before
  %most = load atomic i64, ptr @spin monotonic, align 8
  %follows = icmp slt i64 %gap, %most
  %least = select i1 %follows, i64 {BURST_NANOSECONDS}, i64 {WAKE_NANOSECONDS}
  %long = icmp sge i64 %last, %least
  %states = getelementptr %job, ptr %job, i64 1
  %address = ptrtoint ptr %job to i64
  %posted = or i64 %address, {POSTED}
  %running = or i64 %address, {RUNNING}
  br label %state
state:
  %s = phi i64 [ 0, %entry ], [ %s.next, %clear ]
  %unclear = icmp slt i64 %s, %count
  br i1 %unclear, label %clear, label %offer
clear:
  %next.p = getelementptr %state, ptr %states, i64 %s, i32 0
  %done.p = getelementptr %state, ptr %states, i64 %s, i32 1
  store i64 0, ptr %next.p
  store i64 0, ptr %done.p
  %s.next = add i64 %s, 1
  br label %state
offer:
  %h = phi i64 [ 0, %state ], [ %h.next, %offered ]
  %unasked = icmp slt i64 %h, %helpers
  br i1 %unasked, label %ask, label %work
ask:
  %post = getelementptr [{MAX_HELPERS} x %post], ptr @posts, i64 0, i64 %h
  %started.p = getelementptr %post, ptr %post, i64 0, i32 2
  %started = load atomic i64, ptr %started.p acquire, align 8
  %none = icmp eq i64 %started, 0
  br i1 %none, label %start, label %post.it
start:
  call void @start(i64 %h)
  br label %post.it
post.it:
  %pair = cmpxchg ptr %post, i64 0, i64 %posted seq_cst monotonic
  %free = extractvalue {{ i64, i1 }} %pair, 1
  %rouse = and i1 %free, %long
  br i1 %rouse, label %wake, label %offered
wake:
  call void @wake(ptr %post)
  br label %offered
offered:
  %h.next = add i64 %h, 1
  br label %offer
work:
  call void @execute(ptr %tasks, i64 %count, ptr %states, ptr %scratch, ptr %word.p)
  br label %collect
collect:
  %c = phi i64 [ 0, %work ], [ %c.next, %collected ]
  %left = icmp slt i64 %c, %helpers
  br i1 %left, label %retract, label %leave
retract:
  %box = getelementptr [{MAX_HELPERS} x %post], ptr @posts, i64 0, i64 %c
  %back = cmpxchg ptr %box, i64 %posted, i64 0 acq_rel acquire
  %found = extractvalue {{ i64, i1 }} %back, 0
  %busy = icmp eq i64 %found, %running
  br i1 %busy, label %wait, label %collected
wait:
  %spins = phi i64 [ 0, %retract ], [ %spins.next, %still ], [ 0, %yield ]
  %held = load atomic i64, ptr %box acquire, align 8
  %inside = icmp eq i64 %held, %running
  br i1 %inside, label %still, label %collected
still:
  %spins.next = add i64 %spins, 1
  %tired = icmp sgt i64 %spins.next, {SPINS_BEFORE_YIELD}
  br i1 %tired, label %yield, label %wait
yield:
  %ignored = call i32 @sched_yield()
  br label %wait
collected:
  %c.next = add i64 %c, 1
  br label %collect
leave:
  %end = call i64 @nanoseconds(ptr %now)
  store atomic i64 %end, ptr @ended monotonic, align 8
  %took = sub i64 %end, %began
  %always.p = getelementptr %job, ptr %job, i64 0, i32 6
  %always = load i64, ptr %always.p
  %told = or i64 %took, %always
  store i64 %told, ptr %last.p
  ret void
}}
"""
WORKER_TEXT = f"""
%task = type {{ ptr, ptr, i64, i64 }}
%state = type {{ i64, i64, [48 x i8] }}
declare i32 @sched_yield()
declare void @{POLL_FUNCTION}(ptr)
{SHARED_WORKER}{SERIAL_WORKER}{JOB_TEXT}"""


@compile_once
def _compile_worker() -> MachineCode:
    interrupts.register_poll_symbol()
    code = MachineCode(WORKER_TEXT)
    posts, close = code.variable("posts"), ctypes.CFUNCTYPE(None, ctypes.c_int64)(code.address("close"))

    def end_helpers() -> None:  # before their machine code is freed; each finishes its job
        for number in range(MAX_HELPERS):
            close(number)

    atexit.register(end_helpers)
    if hasattr(os, "register_at_fork"):  # a child has none of the threads: its mailboxes are empty
        os.register_at_fork(after_in_child=lambda: ctypes.memset(posts, 0, POST_BYTES * MAX_HELPERS))
    return code


@cache
def _get_worker_entry(name: str) -> ctypes._FuncPointer:  # type: ignore[name-defined]
    """The machine code that runs tasks; the interpreter lock is released meanwhile."""
    pointer = ctypes.c_void_p
    return ctypes.CFUNCTYPE(None, pointer, ctypes.c_int64, pointer, pointer, pointer)(_compile_worker().address(name))


@cache
def get_worker_address(serial: bool) -> int:
    """The address of the machine code that runs tasks on one thread, or on the caller's and those of helpers."""
    return _compile_worker().address("execute_serial" if serial else "execute_together")


def choose_thread_count(given: int | None = None) -> int:
    """The number of threads: the argument, else TESSERA_THREADS, else the number of available processors.

    Raises:
        ArgumentError: TESSERA_THREADS is not a positive number.
    """
    text = os.environ.get("TESSERA_THREADS") if given is None else str(given)
    if not text:
        return count_processors()
    if not text.isdigit() or int(text) < 1:
        raise ArgumentError("the number of threads is not a positive number", received=text, expected="1, 2, ...")
    return int(text)


def count_processors() -> int:
    """The number of processors on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        self._addresses = np.array([array_address(a) for a in self._arenas], np.int64)

    @property
    def scratch(self) -> int:
        """The address of the scratch memory of the calling thread."""
        return int(self._addresses[0])

    def make_job(self, tasks: np.ndarray, even: bool) -> np.ndarray | None:
        """The job of tasks, of which one is run at a time; None where one thread alone runs them.

        `even`: the time of one run tells that of the next.
        """
        chunks = max((-(-int(total) // int(chunk)) for _, _, total, chunk in tasks), default=0)
        helpers = min(self.threads, chunks, MAX_HELPERS + 1) - 1
        if helpers < 1:
            return None
        # Where threads share a processor, one that looks at its mailbox keeps another from its work.
        spin = SPIN_NANOSECONDS if self.threads <= count_processors() else 0
        ctypes.c_int64.from_address(_compile_worker().variable("spin")).value = spin
        words = np.zeros((len(tasks) + 2) * LINE_WORDS, np.int64)
        job = words[-array_address(words) % (8 * LINE_WORDS) // 8 :]
        always = 0 if even else LONG_JOB
        job[2:7] = self._stop.address, array_address(self._addresses), helpers, LONG_JOB, always
        return job

    def run(self, tasks: np.ndarray, job: np.ndarray | None) -> None:
        """Run every task, with helpers where there is a job.

        Raises:
            KeyboardInterrupt: the handler of a signal raised it (or another exception); no thread uses the tasks.
        """
        place = 0 if job is None else array_address(job)
        arguments = (array_address(tasks), len(tasks), place, self.scratch, self._stop.address)
        if get_ident() == interrupts.MainThread.number:  # the one that runs signal handlers
            interrupts.get_interruptible_entry()(get_worker_address(job is None), *arguments)
        else:
            with self._stop.cancellable():
                _get_worker_entry("execute_serial" if job is None else "execute_together")(*arguments)
        if self._stop.value == INTERRUPTED:
            interrupts.raise_interrupt()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for threads that are about to leave; a signal does not end the wait."""
    while not condition():
        try:
            time.sleep(1e-3)
        except KeyboardInterrupt:  # one was raised before, which the caller passes on
            continue


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
