"""Streams: launches queued and run in order, beside the program and beside other streams; events between them."""

from __future__ import annotations

import contextvars
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event as Flag
from threading import Lock
from typing import Any

from tessera.errors import ArgumentError, ExecutionError, here
from tessera.kernel.stream_order import HOST, ORDER, Known
from tessera.kernel.streaming import CURRENT

_STREAMS: weakref.WeakSet[Stream] = weakref.WeakSet()


class Queued:
    """A launch on a stream: `wait()` gives what the kernel returns."""

    def __init__(self, task: Future[Any], stream: Stream) -> None:
        self._task, self._stream, self._known = task, stream, ORDER.snapshot(stream.number)

    def done(self) -> bool:
        """Whether it has ended."""
        return self._task.done()

    def wait(self) -> Any:
        """What the launch gives, once it and all before it on its stream have ended.

        Raises:
            TesseraError: the launch failed, or one before it on its stream.
        """
        found = self._task.result()
        ORDER.learn(HOST, self._known)
        if self._stream.error is not None:
            self._stream.synchronize()
        return found


class Stream:
    """Launches in a `with` block of a stream are queued: they run one after the other, while the program goes on.

    Launches of different streams run in any order, and beside each other, but for what events order. Arrays belong to
    the queued launches until they are done: `synchronize()` waits. A launch that fails ends its stream's work: those
    queued behind it, and on streams that wait for them, do not run, and `synchronize()` raises what went wrong.
    In debug mode launches that touch one array (one of them writes) are reported unless something orders them.

    >>> import numpy as np, tessera as ts
    >>> @ts.kernel
    ... def double(x):
    ...     x[ts.tile.program_id(0)] *= 2.0
    >>> x, stream = np.ones(4, np.float32), Stream()
    >>> with stream:
    ...     queued = [double[4](x) for _ in range(3)]
    >>> stream.synchronize()
    >>> x
    array([8., 8., 8., 8.], dtype=float32)
    """

    def __init__(self) -> None:
        self.number = ORDER.stream()
        self.error: Exception | None = None
        self._tasks = ThreadPoolExecutor(1, thread_name_prefix=f"tessera-stream-{self.number}")
        self._lock = Lock()
        self._tokens: list[contextvars.Token[Stream | None]] = []
        _STREAMS.add(self)

    def __enter__(self) -> Stream:
        self._tokens.append(CURRENT.set(self))
        return self

    def __exit__(self, *_: Any) -> None:
        CURRENT.reset(self._tokens.pop())

    def run(self, function: Callable[..., Any], *args: Any, **named: Any) -> Queued:
        """Queue a call of any function of the host; what it touches is not known to debug mode."""
        ORDER.step(self.number)
        return self.queue(lambda: function(*args, **named))

    def queue(self, task: Callable[[], Any]) -> Queued:
        """Queue a task, whose order is known already."""
        context = contextvars.copy_context()
        context.run(CURRENT.set, None)  # what a task launches runs at once
        return Queued(self._tasks.submit(context.run, self._one, task), self)

    def _one(self, task: Callable[[], Any]) -> Any:
        if self.error is not None:
            return None
        try:
            return task()
        except Exception as error:  # it is raised where somebody waits
            self.error = error
            return None

    def record(self, event: Event | None = None) -> Event:
        """An event that happens when all that is queued here so far has ended."""
        found = event or Event()
        found._recorded(ORDER.snapshot(self.number))
        flag = found._flag
        self._tasks.submit(found._happened, self, flag)
        return found

    def wait(self, event: Event) -> None:
        """What is queued here from now on runs after an event; the program goes on.

        Raises:
            ArgumentError: the event was never recorded.
        """
        event._check()
        ORDER.learn(self.number, event._known)
        self._tasks.submit(self._after, event, event._flag)

    def _after(self, event: Event, flag: Flag) -> None:
        flag.wait()
        self.error = self.error or event.error

    def synchronize(self) -> None:
        """Wait until all that is queued here has ended.

        Raises:
            TesseraError: a launch failed; the stream can be used again.
        """
        known = ORDER.snapshot(self.number)
        self._tasks.submit(lambda: None).result()
        ORDER.learn(HOST, known)
        error, self.error = self.error, None
        if error is not None:
            raise error

    def __repr__(self) -> str:
        return f"<stream {self.number}>"


class Event:
    """A point in the order of a stream: `stream.record()` makes one, `other.wait(event)` goes on after it."""

    def __init__(self) -> None:
        self._flag = Flag()
        self._known: Known = {}
        self._marked = False
        self._time = 0.0
        self.error: Exception | None = None

    def record(self, stream: Stream | None = None) -> Event:
        """Happen when all that is queued on a stream (that of the `with` block) so far has ended.

        Raises:
            ArgumentError: no stream is named, and none is current.
        """
        found = stream or CURRENT.get()
        if found is None:
            message = "there is no stream to record an event on"
            raise ArgumentError(message, location=here(), expected="event.record(stream)")
        return found.record(self)

    def done(self) -> bool:
        """Whether it has happened."""
        return self._flag.is_set()

    def synchronize(self) -> None:
        """Wait until it has happened.

        Raises:
            ArgumentError: it was never recorded. TesseraError: a launch before it failed.
        """
        self._check()
        self._flag.wait()
        ORDER.learn(HOST, self._known)
        if self.error is not None:
            raise self.error

    def elapsed_ms(self, later: Event) -> float:
        """Milliseconds from this event to a later one.

        Raises:
            ExecutionError: one of them has not happened yet.
        """
        if not (self.done() and later.done()):
            raise ExecutionError("an event has not happened yet", location=here(), suggestion="later.synchronize()")
        return (later._time - self._time) * 1e3

    def _recorded(self, known: Known) -> None:
        self._flag, self._known, self._marked = Flag(), known, True

    def _happened(self, stream: Stream, flag: Flag) -> None:
        self._time, self.error = time.perf_counter(), stream.error
        flag.set()

    def _check(self) -> None:
        if not self._marked:
            message = "an event that was never recorded is waited for"
            raise ArgumentError(message, location=here(), suggestion="event.record(stream) first")


def synchronize() -> None:
    """Wait for every stream.

    Raises:
        TesseraError: a launch failed.
    """
    for stream in sorted(_STREAMS, key=lambda s: s.number):
        stream.synchronize()
