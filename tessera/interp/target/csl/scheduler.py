"""The part of a PE that runs generators: they wait, are continued, end; what they raise becomes a fault."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from tessera.errors import Location, TesseraError
from tessera.interp.target.csl.events import Events
from tessera.interp.target.csl.faults import CslFault
from tessera.interp.target.csl.sources import Wait
from tessera.interp.target.csl.streams import Thread
from tessera.interp.target.csl.values import Fifo

if TYPE_CHECKING:
    from tessera.interp.target.csl.program import Program

_FAULTS = (IndexError, ZeroDivisionError, TypeError, AttributeError, OverflowError, ValueError)


class Running:
    """A generator under way: the task at the front, or a microthread."""

    def __init__(self, name: str, body: Thread, done: Callable[[], None] | None, front: bool, loc: Location) -> None:
        self.name, self.body, self.done, self.front, self.loc = name, body, done, front, loc
        self.wait: Any = None


class Scheduler:
    """The generators of one PE."""

    program: Program
    events: Events
    clock: int
    x: int
    y: int
    threads: dict[Running, None]
    waiters: dict[Any, list[Running]]
    pending: deque[Any]

    if TYPE_CHECKING:

        def settle(self) -> None: ...

    def notify(self, kind: str, key: Any) -> None:
        """Continue the threads that wait for this."""
        waiting = self.waiters.pop((kind, _key(key)), None)
        for running in waiting or ():
            self.events.at(self.events.now, partial(self._resume, running))

    def spawn(self, body: Thread, on_done: Callable[[], None] | None = None, name: str = "thread") -> None:
        """Run a generator beside the tasks."""
        self.begin(name, body, on_done, Location())

    def begin(self, name: str, body: Thread, done: Callable[[], None] | None, loc: Location) -> None:
        """Run a generator beside the tasks, from the present cycle of this PE on."""
        running = Running(name, body, done, False, loc)
        self.threads[running] = None
        self.events.at(max(self.clock, self.events.now), lambda: self._resume(running))

    def _resume(self, running: Running) -> None:
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
            if isinstance(wait, Wait):
                running.wait = wait
                self.waiters.setdefault((wait.kind, _key(wait.key)), []).append(running)
                return
            if wait is not None and wait > self.events.now:
                self.events.at(wait, partial(self._resume, running))
                return
        self.threads.pop(running, None)
        if running.done is not None:
            running.done()

    def _failed(self, error: Exception, running: Running | None = None, line: int | None = None) -> NoReturn:
        """Raise what generated code raised as a fault with a place; what is no fault of the program, as it is."""
        line = self._generated(error) if line is None else line
        if isinstance(error, TesseraError):
            self._place(error, line, running)
        elif line is not None and isinstance(error, _FAULTS):
            raise self._place(CslFault(_words(error)), line, running) from error
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

    def _place(self, error: TesseraError, line: int | None, running: Running | None) -> TesseraError:
        if error.location is None and line is not None:
            error.location = self.program.place(line)
        elif error.location is None and running is not None and running.loc.line:
            error.location = running.loc
        if not error.message.startswith("PE ("):
            error.message = f"PE ({self.x}, {self.y}): {error.message}"
        return error


def _key(key: Any) -> Any:
    return id(key) if isinstance(key, Fifo) else key


def _words(error: Exception) -> str:
    if isinstance(error, ZeroDivisionError):
        return "division by zero"
    if isinstance(error, TypeError):
        return f"use of an uninitialized pointer or descriptor ({error})"
    return str(error)


def wait_words(wait: Any) -> str:
    if not isinstance(wait, Wait):
        return "its turn"
    words = {"in": "a wavelet on color", "out": "room to send on color", "fifo": "FIFO", "state": "state"}
    return f"{words.get(wait.kind, wait.kind)} {'' if wait.kind == 'fifo' else wait.key}".rstrip()
