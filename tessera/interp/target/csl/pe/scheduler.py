"""Discrete-event scheduler: the event queue of a simulation, and the coroutines (tasks and microthreads) of one PE."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from tessera.core.errors import Location, TesseraError
from tessera.interp.target.csl.pe.dsd_operations import Microthread
from tessera.interp.target.csl.pe.microthreads import WaitCondition
from tessera.interp.target.csl.sema.values import Fifo
from tessera.interp.target.csl.text.diagnostics import CslFault

if TYPE_CHECKING:
    from tessera.interp.target.csl.pe.program import PeProgram


# The clock of a simulation: calls in order of their cycle.


class EventQueue:
    """A heap of (cycle, call). Calls of one cycle keep their order, or are shuffled by `seed` to expose races.

    >>> log, events = [], EventQueue()
    >>> events.at(5, lambda: log.append("late")); events.at(2, lambda: log.append("early"))
    >>> events.run(); log, events.now
    (['early', 'late'], 5)
    """

    def __init__(self, seed: int | None = None) -> None:
        self.now = 0
        self._heap: list[tuple[int, float, int, Callable[[], object]]] = []
        self._count = 0
        self.random = None if seed is None else random.Random(seed)

    def at(self, time: int, call: Callable[[], object]) -> None:
        """Call at that cycle (now, if it has passed)."""
        self._count += 1
        order = self.random.random() if self.random else 0.0
        heapq.heappush(self._heap, (time if time > self.now else self.now, order, self._count, call))

    def run(self, until: Callable[[], bool] | None = None, limit: int | None = None) -> None:
        """Run until nothing is left, `until()` holds, or the clock would pass `limit`."""
        heap, pop = self._heap, heapq.heappop
        with np.errstate(all="ignore"):  # NaN and infinity are values to a PE
            while heap and not (until is not None and until()):
                if limit is not None and heap[0][0] > limit:
                    self.now = limit
                    return
                self.now, _, _, call = pop(heap)
                call()

    @property
    def pending(self) -> int:
        """How many calls are due."""
        return len(self._heap)


# The part of a PE that runs generators: they wait, are continued, end; what they raise becomes a fault.


_PROGRAM_FAULTS = (IndexError, ZeroDivisionError, TypeError, AttributeError, OverflowError, ValueError)


class Coroutine:
    """A generator under way: the task at the front, or a microthread."""

    def __init__(
        self, name: str, body: Microthread, done: Callable[[], None] | None, front: bool, loc: Location
    ) -> None:
        self.name, self.body, self.done, self.front, self.loc = name, body, done, front, loc
        self.wait: Any = None


class PeScheduler:
    """The generators of one PE."""

    program: PeProgram
    events: EventQueue
    clock: int
    x: int
    y: int
    threads: dict[Coroutine, None]
    waiters: dict[Any, list[Coroutine]]
    pending: deque[Any]

    if TYPE_CHECKING:

        def settle(self) -> None: ...

    def notify(self, kind: str, key: Any) -> None:
        """Continue the threads that wait for this."""
        waiting = self.waiters.pop((kind, _wait_key(key)), None)
        for running in waiting or ():
            self.events.at(self.events.now, partial(self._resume, running))

    def spawn(self, body: Microthread, on_done: Callable[[], None] | None = None, name: str = "thread") -> None:
        """Run a generator beside the tasks."""
        self.begin(name, body, on_done, Location())

    def begin(self, name: str, body: Microthread, done: Callable[[], None] | None, loc: Location) -> None:
        """Run a generator beside the tasks, from the present cycle of this PE on."""
        running = Coroutine(name, body, done, False, loc)
        self.threads[running] = None
        self.events.at(max(self.clock, self.events.now), lambda: self._resume(running))

    def _resume(self, running: Coroutine) -> None:
        """Continue a generator until it waits or ends."""
        running.wait = None
        if self.pending:
            self.settle()
        while True:
            if running.front and self.clock < self.events.now:
                self.clock = self.events.now
            try:
                wait: Any = next(running.body, running)
            except Exception as error:
                self._failed(error, running)
            if wait is running:
                break
            if isinstance(wait, WaitCondition):
                running.wait = wait
                self.waiters.setdefault((wait.kind, _wait_key(wait.key)), []).append(running)
                return
            if wait is not None and wait > self.events.now:
                self.events.at(wait, partial(self._resume, running))
                return
        self.threads.pop(running, None)
        if running.done is not None:
            running.done()

    def _failed(self, error: Exception, running: Coroutine | None = None, line: int | None = None) -> NoReturn:
        """Raise what generated code raised as a fault with a place; what is no fault of the program, as it is."""
        line = self._generated(error) if line is None else line
        if isinstance(error, TesseraError):
            self._place(error, line, running)
        elif line is not None and isinstance(error, _PROGRAM_FAULTS):
            raise self._place(CslFault(_describe_error(error)), line, running) from error
        raise error

    def _generated(self, error: BaseException) -> int | None:
        """The innermost line of this program's Python that an error passed."""
        line, name = None, self.program.code.co_filename
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == name:
                line = trace.tb_lineno
            trace = trace.tb_next
        return line

    def _place(self, error: TesseraError, line: int | None, running: Coroutine | None) -> TesseraError:
        if error.location is None and line is not None:
            error.location = self.program.place(line)
        elif error.location is None and running is not None and running.loc.line:
            error.location = running.loc
        if not error.message.startswith("PE ("):
            error.message = f"PE ({self.x}, {self.y}): {error.message}"
        return error


def _wait_key(key: Any) -> Any:
    return id(key) if isinstance(key, Fifo) else key


def _describe_error(error: Exception) -> str:
    if isinstance(error, ZeroDivisionError):
        return "division by zero"
    if isinstance(error, TypeError):
        return f"use of an uninitialized pointer or descriptor ({error})"
    return str(error)


def describe_wait(wait: Any) -> str:
    if not isinstance(wait, WaitCondition):
        return "its turn"
    words = {"in": "a wavelet on color", "out": "room to send on color", "fifo": "FIFO", "state": "state"}
    return f"{words.get(wait.kind, wait.kind)} {'' if wait.kind == 'fifo' else wait.key}".rstrip()
