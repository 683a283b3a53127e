"""Streams and events: launches queued in order beside the program, and race detection between streams by vector clocks.

A launch comes before another if that one's stream knows of it, through the stream's own
order, through events, or through the host that waited (rule M15 of docs/semantics.md).
"""

from __future__ import annotations

import contextvars
import itertools
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event as Flag
from threading import Lock, RLock
from typing import Any

import numpy as np

from tessera.core.array_memory import array_span
from tessera.core.errors import ArgumentError, ExecutionError, Location, user_location
from tessera.interp.sanitizer.report import ACTIVE_CHECKS, Checks, Finding
from tessera.ir.core import Module
from tessera.runtime.launch.execution import CURRENT_STREAM, UNORDERED_USES, find_written_params

# Which launches are ordered: clocks of streams and the host, and what was touched by launches that nothing orders.
#
# The clocks are vector clocks: a launch comes before another if that one's stream knows of it, through the stream's own
# order, through events, or through the host that waited (rule M15 of docs/semantics.md).


HOST_STREAM = 0
StreamClocks = dict[int, int]  # of each stream (and the host) how many of its launches are known to come before


@dataclass(frozen=True)
class ArrayUse:
    """A launch's use of an array: where it lies, whether it writes, and when: the how-manieth of which stream.

    The array is kept, so that its memory is not another's while this counts.
    """

    low: int
    high: int
    writes: bool
    stream: int
    time: int
    kernel: str
    array: str
    place: Location
    kept: np.ndarray = field(repr=False)


@dataclass
class LaunchOrder:
    """What the streams of this process know of each other."""

    known: dict[int, StreamClocks] = field(default_factory=lambda: {HOST_STREAM: {HOST_STREAM: 0}})
    touched: list[ArrayUse] = field(default_factory=lambda: UNORDERED_USES)
    lock: Any = field(default_factory=RLock)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def stream(self) -> int:
        """The number of a new stream."""
        with self.lock:
            number = next(self.numbers)
            self.known[number] = {number: 0}
            return number

    def snapshot(self, stream: int) -> StreamClocks:
        """What a stream knows at this point of its order."""
        with self.lock:
            return dict(self.known[stream])

    def learn(self, stream: int, other: StreamClocks) -> None:
        """A stream goes on after what another knew at some point."""
        with self.lock:
            own = self.known[stream]
            for number, time in other.items():
                own[number] = max(own.get(number, 0), time)
            if stream == HOST_STREAM:  # what the host has waited for comes before all that follows
                self.touched[:] = [t for t in self.touched if own.get(t.stream, 0) < t.time]

    def step(self, stream: int) -> int:
        """One more thing is queued on a stream, after all that the host knows of; its number there."""
        with self.lock:
            self.learn(stream, self.known[HOST_STREAM])
            self.known[stream][stream] += 1
            return self.known[stream][stream]

    def launch(self, stream: int, module: Module, arrays: Mapping[str, Any]) -> None:
        """A launch joins a stream's order (or the host's); in debug mode those it meets unordered are reported."""
        with self.lock:
            time = 0 if stream == HOST_STREAM else self.step(stream)
            if (checks := ACTIVE_CHECKS.get()) is None:
                return
            kernel, writes = module.functions[1].name, find_written_params(module)
            for place, (name, array) in enumerate(arrays.items()):
                if isinstance(array, np.ndarray) and array.size:
                    new = ArrayUse(
                        *array_span(array), place in writes, stream, time, kernel, name, user_location(), array
                    )
                    self._enter(new, checks)

    def _enter(self, new: ArrayUse, checks: Checks) -> None:
        known = self.known[new.stream]
        met = next((t for t in self.touched if self._meet(t, new, known)), None)
        if met is not None:
            checks.found(_stream_race_finding(met, new))
        if new.stream != HOST_STREAM:  # the host's own is done when it returns
            self.touched.append(new)

    def _meet(self, old: ArrayUse, new: ArrayUse, known: StreamClocks) -> bool:
        overlap = old.low < new.high and new.low < old.high
        return overlap and (old.writes or new.writes) and known.get(old.stream, 0) < old.time


def _stream_race_finding(old: ArrayUse, new: ArrayUse) -> Finding:
    said = f"{_describe_use(new)} meets {_describe_use(old)}, and nothing orders the two launches"
    advice = "stream.wait(other.record()), or synchronize() before the launch"
    return Finding("stream race", said, new.place, other=old.place, suggestion=advice)


def _describe_use(one: ArrayUse) -> str:
    where = f"on stream {one.stream}" if one.stream != HOST_STREAM else "on no stream"
    return f"{one.kernel} {where}, which {'writes' if one.writes else 'reads'} `{one.array}`,"


LAUNCH_ORDER = LaunchOrder()


# Streams: launches queued and run in order, beside the program and beside other streams; events between them.


_STREAMS: weakref.WeakSet[Stream] = weakref.WeakSet()


class QueuedLaunch:
    """A launch on a stream: `wait()` gives what the kernel returns."""

    def __init__(self, task: Future[Any], stream: Stream) -> None:
        self._task, self._stream, self._known = task, stream, LAUNCH_ORDER.snapshot(stream.number)

    def done(self) -> bool:
        """Whether it has ended."""
        return self._task.done()

    def wait(self) -> Any:
        """What the launch gives, once it and all before it on its stream have ended.

        Raises:
            TesseraError: the launch failed, or one before it on its stream.
        """
        found = self._task.result()
        LAUNCH_ORDER.learn(HOST_STREAM, self._known)
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
        self.number = LAUNCH_ORDER.stream()
        self.error: Exception | None = None
        self._tasks = ThreadPoolExecutor(1, thread_name_prefix=f"tessera-stream-{self.number}")
        self._lock = Lock()
        self._tokens: list[contextvars.Token[Stream | None]] = []
        _STREAMS.add(self)

    def __enter__(self) -> Stream:
        self._tokens.append(CURRENT_STREAM.set(self))
        return self

    def __exit__(self, *_: Any) -> None:
        CURRENT_STREAM.reset(self._tokens.pop())

    def run(self, function: Callable[..., Any], *args: Any, **named: Any) -> QueuedLaunch:
        """Queue a call of any function of the host; what it touches is not known to debug mode."""
        LAUNCH_ORDER.step(self.number)
        return self.queue(lambda: function(*args, **named))

    def queue(self, task: Callable[[], Any]) -> QueuedLaunch:
        """Queue a task, whose order is known already."""
        context = contextvars.copy_context()
        context.run(CURRENT_STREAM.set, None)  # what a task launches runs at once
        return QueuedLaunch(self._tasks.submit(context.run, self._one, task), self)

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
        found._recorded(LAUNCH_ORDER.snapshot(self.number))
        flag = found._flag
        self._tasks.submit(found._happened, self, flag)
        return found

    def wait(self, event: Event) -> None:
        """What is queued here from now on runs after an event; the program goes on.

        Raises:
            ArgumentError: the event was never recorded.
        """
        event._check()
        LAUNCH_ORDER.learn(self.number, event._known)
        self._tasks.submit(self._after, event, event._flag)

    def _after(self, event: Event, flag: Flag) -> None:
        flag.wait()
        self.error = self.error or event.error

    def synchronize(self) -> None:
        """Wait until all that is queued here has ended.

        Raises:
            TesseraError: a launch failed; the stream can be used again.
        """
        known = LAUNCH_ORDER.snapshot(self.number)
        self._tasks.submit(lambda: None).result()
        LAUNCH_ORDER.learn(HOST_STREAM, known)
        error, self.error = self.error, None
        if error is not None:
            raise error

    def __repr__(self) -> str:
        return f"<stream {self.number}>"


class Event:
    """A point in the order of a stream: `stream.record()` makes one, `other.wait(event)` goes on after it."""

    def __init__(self) -> None:
        self._flag = Flag()
        self._known: StreamClocks = {}
        self._marked = False
        self._time = 0.0
        self.error: Exception | None = None

    def record(self, stream: Stream | None = None) -> Event:
        """Happen when all that is queued on a stream (that of the `with` block) so far has ended.

        Raises:
            ArgumentError: no stream is named, and none is current.
        """
        found = stream or CURRENT_STREAM.get()
        if found is None:
            message = "there is no stream to record an event on"
            raise ArgumentError(message, location=user_location(), expected="event.record(stream)")
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
        LAUNCH_ORDER.learn(HOST_STREAM, self._known)
        if self.error is not None:
            raise self.error

    def elapsed_ms(self, later: Event) -> float:
        """Milliseconds from this event to a later one.

        Raises:
            ExecutionError: one of them has not happened yet.
        """
        if not (self.done() and later.done()):
            raise ExecutionError(
                "an event has not happened yet", location=user_location(), suggestion="later.synchronize()"
            )
        return (later._time - self._time) * 1e3

    def _recorded(self, known: StreamClocks) -> None:
        self._flag, self._known, self._marked = Flag(), known, True

    def _happened(self, stream: Stream, flag: Flag) -> None:
        self._time, self.error = time.perf_counter(), stream.error
        flag.set()

    def _check(self) -> None:
        if not self._marked:
            message = "an event that was never recorded is waited for"
            raise ArgumentError(message, location=user_location(), suggestion="event.record(stream) first")


def synchronize() -> None:
    """Wait for every stream.

    Raises:
        TesseraError: a launch failed.
    """
    for stream in sorted(_STREAMS, key=lambda s: s.number):
        stream.synchronize()
