"""PE state: the event queue of a simulation, and the data of one processing element, on which the functions of this
package act."""

from __future__ import annotations

import gc
import math
import random
from collections import deque
from collections.abc import Callable, Sized
from heapq import heappop, heappush
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tessera.core.errors import Location, TesseraError
from tessera.interp.target.csl.pe.dsd_operations import Microthread, forget_views
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.compilation_unit import BoundTask
from tessera.interp.target.csl.sema.values import Dsr, DsrContents, Fifo
from tessera.interp.target.csl.text.diagnostics import name_run_error, report_no_progress

if TYPE_CHECKING:
    from tessera.interp.target.csl.pe.program import PeProgram

Call = Callable[[], object]
QueueId = tuple[str, int]  # "in" or "out", and the number of the queue
TaskCall = tuple[str, Callable[..., Any], tuple[Any, ...]]  # name, function, arguments
CALLS_PER_REPORT = 1 << 13  # of progress
FOREVER = (True,)  # the condition of a run to its end
MANY_WORDS = 5_000  # new objects after which the collector's next walk would be long
FOUND_FROZEN: list[bool] = []  # not empty once objects of this process were found to be frozen
MAX_CALLS_PER_CYCLE = 1 << 21  # calls of one cycle: more are a loop that makes no progress


class without_collection:
    """Run without Python's cyclic garbage collector: the words of a run are many and form no cycles.

    Afterwards all objects belong to the oldest generation: the collector would otherwise walk through those of the run
    at once.
    """

    __slots__ = ("enabled",)

    def __enter__(self) -> None:
        self.enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.enabled:
            if gc.get_count()[0] > MANY_WORDS and not _holds_frozen_objects():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _holds_frozen_objects() -> bool:
    """Whether this process has frozen objects; the count walks through all of them, so what it found once is kept."""
    if not FOUND_FROZEN and gc.get_freeze_count():
        FOUND_FROZEN.append(True)
    return bool(FOUND_FROZEN)


class ProgressReports:
    """The reports of a run after many calls: a cycle that has too many of them is a loop without progress."""

    def __init__(self, tell: Callable[[int], None] | None) -> None:
        self.tell, self.cycle, self.count = tell, 0, 0

    def add(self, now: int) -> None:
        """Report the cycle.

        Raises:
            CslFault: a cycle has more than `MAX_CALLS_PER_CYCLE` calls.
        """
        self.count, self.cycle = (self.count + 1 if self.cycle == now else 0), now
        if self.count * CALLS_PER_REPORT > MAX_CALLS_PER_CYCLE:
            report_no_progress(now)
        if self.tell is not None:
            self.tell(now)


class EventQueue:
    """Discrete-event queue: the calls of each cycle, and a heap of the cycles that have calls.

    Calls of one cycle keep their order. With a `seed` they are shuffled, which exposes races.

    >>> log, events = [], EventQueue()
    >>> events.at(5, lambda: log.append("late")); events.at(2, lambda: log.append("early"))
    >>> events.run(); log, events.now
    (['early', 'late'], 5)
    """

    def __init__(self, seed: int | None = None) -> None:
        self.now = 0
        self.end = 0  # the cycle until which PEs are busy: that of a run without further events
        self._cycles: list[int] = []  # a heap
        self._calls: dict[int, list[Call]] = {}
        # The calls of the present and later cycles, to which a caller may append without `at`; with a seed none.
        self.slots: dict[int, list[Call]] = self._calls if seed is None else {}
        self._shuffled: dict[int, list[tuple[float, int, Call]]] = {}  # a heap for each cycle, with a seed
        self._count = 0  # the calls that were shuffled
        # The calls of the present cycle, those that have not run, and the number of those that no call of it added.
        self._running: list[Call] = []
        self._left, self._known = iter(self._running), 0
        self.random = None if seed is None else random.Random(seed)
        self.progress: Callable[[int], None] | None = None  # told the cycle now and then

    def at(self, time: int, call: Call) -> None:
        """Schedule a call at a cycle, or at the present cycle if that one has passed."""
        calls = self.slots.get(time)
        if calls is not None:
            calls.append(call)
        elif time > self.now and self.random is None:
            self._calls[time] = [call]
            heappush(self._cycles, time)
        else:
            self._schedule(time if time > self.now else self.now, call)

    def _schedule(self, time: int, call: Call) -> None:
        """Schedule a call at the present cycle, or with a seed at any."""
        calls = self._calls.get(time)
        if calls is None:
            calls = self._open(time)
        if self.random is None:
            calls.append(call)
        else:
            self._shuffle(time, call, calls)

    def _open(self, time: int) -> list[Call]:
        """The calls of a cycle that has none."""
        calls: list[Call] = []
        self._calls[time] = calls
        heappush(self._cycles, time)
        return calls

    def _shuffle(self, time: int, call: Call, calls: list[Call]) -> None:
        """Schedule a call at a random place among those of its cycle."""
        self._count += 1
        shuffled = self._shuffled.setdefault(time, [])
        heappush(shuffled, (self.random.random() if self.random else 0.0, self._count, call))
        calls.append(lambda: heappop(shuffled)[2]())

    def run(self, limit: int | None = None, awaited: Sized = FOREVER) -> None:
        """Run until the queue or `awaited` is empty, or the clock would pass `limit`."""
        with np.errstate(all="ignore"), without_collection():  # a PE computes with NaN
            try:
                self._run(math.inf if limit is None else limit, awaited)
            except BaseException as error:
                self._forget_calls()
                if isinstance(error, TesseraError) or not isinstance(error, Exception):
                    raise
                raise name_run_error(error, self.now) from error
            finally:
                forget_views()

    def _run(self, limit: float, awaited: Sized) -> None:
        cycles, by_cycle, count, reports = self._cycles, self._calls, 0, ProgressReports(self.progress)
        while cycles and awaited:
            now = cycles[0]
            if now > limit:
                self.now, self._known = int(limit), -1
                return
            self._running = calls = by_cycle[now]
            self._known = -1 if now == self.now else len(calls)
            self._left = left = iter(calls)
            self.now = now
            for call in islice(left, CALLS_PER_REPORT):  # also those that they add
                if not awaited:
                    self._forget_calls(1)
                    return
                call()
            count += len(calls)
            if count >= CALLS_PER_REPORT:
                count = 0
                reports.add(now)
                if length_hint(left):
                    self._forget_calls()
                    continue
            heappop(cycles)
            del by_cycle[now]
            if self._shuffled:
                self._shuffled.pop(now, None)
        if not cycles and self.now < self.end <= limit:
            self.now = self.end

    def _forget_calls(self, kept: int = 0) -> None:
        """Remove the calls of the present cycle that have run, except for the last `kept` ones."""
        gone = len(self._running) - length_hint(self._left) - kept
        self._known = -1 if gone > self._known else len(self._running)
        del self._running[:gone]
        self._left = iter(self._running)

    @property
    def late(self) -> bool:
        """Whether the present call was added in its own cycle."""
        return len(self._running) - length_hint(self._left) > self._known

    @property
    def pending(self) -> int:
        """The number of scheduled calls."""
        return sum(len(calls) for calls in self._calls.values())


class WaitCondition(NamedTuple):
    """What a thread waits for: a wavelet ("in"), room in an output queue ("out"), a FIFO, or a library's state."""

    kind: str
    key: Any


def _never_resumed() -> None:
    raise AssertionError("the thread has no PE")


class PeThread:
    """A suspended or running generator: the foreground task, or a microthread."""

    __slots__ = ("again", "body", "done", "front", "loc", "name", "wait")

    def __init__(
        self, name: str, body: Microthread, done: Callable[[], None] | None, front: bool, loc: Location
    ) -> None:
        self.name, self.body, self.done, self.front, self.loc = name, body, done, front, loc
        self.wait: Any = None
        self.again: Callable[[], None] = _never_resumed


class PeState:
    """The data of a PE at (x, y) of the program rectangle that runs `program`.

    `fabric` is the PE's view of its router, or None for a PE without a fabric.
    """

    # More attributes than Python keeps in a compact dictionary.
    __slots__ = (
        "active", "arrays", "beginning", "blocked", "busy", "calls", "clock", "control", "control_ended_colors", "data",
        "dispatch", "dsrs", "events", "fabric", "fifos", "flushed", "front", "high_priority", "in_colors", "limit",
        "local", "lockstep_group", "memory_used", "needs_queue_initialisation", "numbers", "operation_end",
        "out_colors", "output", "overtaken", "pending", "program", "queue_numbers", "ready_colors", "registers",
        "space", "state", "threads", "trace", "traces", "waiters", "wake_time", "wide", "x", "y",
    )  # fmt: skip

    registers: Any  # the router's configuration registers
    space: dict[str, Any]  # the globals of the generated Python
    numbers: dict[int, int]  # the number of the global variable of each array, by the array's id
    arrays: list[Any]  # the memory of the global variables, by number
    dispatch: Callable[[], None]  # selects and runs a task

    def __init__(
        self, program: PeProgram, x: int, y: int, events: EventQueue, fabric: Any = None, lockstep_group: Any = None
    ) -> None:
        self.program, self.x, self.y, self.events, self.fabric = program, x, y, events, fabric
        self.wide = int(program.unit.options.arch == "wse3")
        # SDK 2.10 no longer initializes input queues implicitly.
        self.needs_queue_initialisation = bool(self.wide) or program.unit.options.late
        self.clock = 0
        self.operation_end = -1  # the cycle at which the last synchronous operation on the fabric ended
        self.limit: float = math.inf  # the last cycle of the run
        self.memory_used = program.memory_used
        self.fifos = [Fifo(size, *map(program.task_number, tasks)) for size, *tasks in program.tables.fifos]
        self.dsrs: dict[Dsr, DsrContents] = {}
        self.busy: dict[tuple[str, int], Location] = {}  # queues and microthreads in use, and by which operation
        self.state: dict[str, Any] = {}  # the state of libraries, by name
        self.traces: dict[str, list[Any]] = {}
        self.output: list[str] = []  # the lines that the PE printed
        self.trace: Callable[[str, int, int], None] | None = None  # called with the name, start and end of each task
        self.lockstep_group = lockstep_group
        self.pending: deque[Any] = deque()  # deferred memory steps of recorded tasks
        self._set_queues(program)
        self._set_tasks(program)

    def _set_queues(self, program: PeProgram) -> None:
        self.in_colors, self.out_colors = dict(program.tables.queues_in), dict(program.tables.queues_out)
        self.number_queues()
        self.flushed: dict[QueueId, None] = {}  # flushed queues whose handlers were called
        self.control_ended_colors: set[int] = set()  # colors whose control wavelets end an operation
        self.ready_colors: dict[int, None] = {}  # colors whose input queues hold wavelets

    def number_queues(self) -> None:
        """Find the numbers of the colors' tasks: on WSE-3 that of the first input queue, if the color has one."""
        queues = reversed(self.in_colors.items()) if self.wide else ()
        self.queue_numbers = {color: queue for queue, color in queues}

    def _set_tasks(self, program: PeProgram) -> None:
        tables = program.tables
        self.local: dict[int, BoundTask] = {n: task for (kind, n), task in tables.tasks.items() if kind == "local"}
        self.control: dict[int, BoundTask] = {n: task for (kind, n), task in tables.tasks.items() if kind == "control"}
        self.data: dict[int, BoundTask] = {}  # data tasks, by color
        self.active: dict[int, None] = dict.fromkeys(tables.activated)
        self.blocked = set(tables.blocked)
        self.high_priority: set[int] = set()  # task ids, colors and queues whose tasks go first
        self.overtaken: dict[int, int] = {}  # how often other tasks overtook a ready one, by id
        self.calls: deque[TaskCall] = deque()  # calls of the host and of handlers
        self.front: PeThread | None = None  # the running task
        self.threads: dict[PeThread, None] = {}  # the running microthreads
        self.beginning: list[tuple[int, Call]] = []  # setup and start of those that begin when the task ends
        self.waiters: dict[Any, list[PeThread]] = {}
        self.wake_time: int | None = None  # the cycle of the next scheduled task selection


def unpack_arguments(params: tuple[t.CslType, ...], word: int) -> tuple[Any, ...]:
    """The task parameters in a wavelet: one of 32 bits, or up to two of 16 bits, the low half first."""
    return tuple([param.unpack(word >> 16 * place) for place, param in enumerate(params)])
