"""Streams and events: kernels run at once or queued in order beside the program, and races between streams are detected
by vector clocks.
"""

from __future__ import annotations

import contextvars
import itertools
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Event as Flag
from threading import Lock, RLock
from typing import Any

import numpy as np

from tessera.core.device import INTERP, array_span, default_device, find_generator_name
from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError, ExecutionError, Location, TesseraError, user_location
from tessera.core.progress import CANCEL_TOKEN, CancelToken
from tessera.core.queued_failures import wait_and_examine
from tessera.interp.sanitizer.report import ACTIVE_CHECKS, Checks, Finding
from tessera.ir.core import Module
from tessera.ops.dialects import tile

# Kernel execution: runs a Tile module on arrays in place, with a program cache, and on the current stream.


RunFunction = Callable[[Sequence[Any]], list[np.ndarray]]
MAX_CACHED_PROGRAMS = 256
# Keyed by the module's id: the cache keeps the module alive, so no other module has that id.
_PROGRAMS: OrderedDict[tuple[int, str, bool], tuple[Module, RunFunction]] = OrderedDict()
_LOCK = Lock()


def run_module(module: Module, arrays: Sequence[np.ndarray], target: str | None) -> list[np.ndarray]:
    """Run a Tile module: return its results; the arrays that it writes are updated in place."""
    for array in arrays:
        if array.__class__ is DeviceArray:
            return _run_on_device(module, arrays, target)
        flags = array.flags
        if not (flags.c_contiguous and flags.writeable):
            return _run_packed(module, arrays, target)
    return execute_module(module, arrays, target)


def _run_on_device(module: Module, arrays: Sequence[Any], target: str | None) -> Any:
    """Run a Tile module where its arrays lie: on a device with a memory of its own.

    Raises:
        ArgumentError: the kernel is for another target; a memory that it writes lies elsewhere.
    """
    memory = next(a.memory for a in arrays if a.__class__ is DeviceArray)
    if target is not None and find_generator_name(target) != memory.generator:
        raise ArgumentError(
            f"a kernel for {target} takes an array on {memory.name}", location=user_location(),
            expected="arrays in host memory", suggestion='x.to("cpu")',
        )  # fmt: skip
    try:
        return _compile_once(module, memory.generator, resident=True)(arrays)
    except TesseraError as error:
        raise error.at(user_location()) from None


def _run_packed(module: Module, arrays: Sequence[np.ndarray], target: str | None) -> list[np.ndarray]:
    """Run a Tile module on contiguous copies of the arrays that are not contiguous."""
    _check_writeable(module, arrays)
    packed = [np.ascontiguousarray(a) if a.ndim else a for a in arrays]  # kernels index contiguous rows
    outputs = execute_module(module, packed, target)
    for array, held in zip(arrays, packed, strict=True):
        if held is not array and array.flags.writeable:
            array[...] = held
    return outputs


def _check_writeable(module: Module, arrays: Sequence[np.ndarray]) -> None:
    for place in find_written_params(module):
        if not arrays[place].flags.writeable:
            name = module.functions[1].params[place].hint
            raise ArgumentError(
                f"`{name}` is written by the kernel, but is read-only", location=user_location(),
                expected="a writeable array", received=f"a read-only one of shape {arrays[place].shape}",
                suggestion=f"pass {name}.copy()",
            )  # fmt: skip


@lru_cache(maxsize=1024)
def find_written_params(module: Module) -> tuple[int, ...]:
    """Return the indices of the parameters that a kernel writes, without its outputs."""
    kernel = module.functions[1]
    count = len(kernel.params) - int(module.main.attrs.get("outputs", 0))
    targets = tile.find_written_refs(kernel.body)
    return tuple(i for i, p in enumerate(kernel.params[:count]) if p in targets)


def execute_module(module: Module, arrays: Sequence[np.ndarray], target: str | None) -> list[np.ndarray]:
    """Run a Tile module on a target, or on the default device."""
    generator = find_generator_name(target or default_device())
    if generator == INTERP:
        from tessera.interp.tile import (
            interpreter,
        )  # the Tile interpreter directly: a kernel needs none of the levels above

        return interpreter.run(module, arrays)
    return compile_module(module, generator)(arrays)


def compile_module(module: Module, generator: str) -> RunFunction:
    """Compile a Tile module for a target; the last `MAX_CACHED_PROGRAMS` compiled programs are cached."""
    return _compile_once(module, generator)


def _compile_once(module: Module, generator: str, resident: bool = False) -> RunFunction:
    """The compiled program of a module; `resident` takes and gives arrays of the device."""
    place = (id(module), generator, resident)
    with _LOCK:
        if place in _PROGRAMS:
            _PROGRAMS.move_to_end(place)
            return _PROGRAMS[place][1]
    from tessera.runtime import driver  # loads the levels above: the interpreter needs none of them

    run: Any = driver.make_runtime(module, generator).call if resident else driver.compile_tile(module, generator)  # type: ignore[attr-defined]
    with _LOCK:
        _PROGRAMS[place] = (module, run)
        if len(_PROGRAMS) > MAX_CACHED_PROGRAMS:
            _PROGRAMS.popitem(last=False)
    return run


# The stream that launches are queued on; None: they run synchronously.
CURRENT_STREAM: ContextVar[Any] = ContextVar("stream", default=None)
# Debug mode: array uses by queued launches that the host has not synchronised with (streams.py).
UNORDERED_USES: list[Any] = []


def order_launch(module: Any, arrays: Any) -> Any:
    """Order a launch on the current stream, or on the host; return its stream, or None.

    Raises:
        RaceError: in debug mode, another launch uses the same memory and nothing orders the two.
    """
    stream = CURRENT_STREAM.get()
    if stream is not None or UNORDERED_USES:
        LAUNCH_ORDER.launch(HOST_STREAM if stream is None else stream.number, module, arrays())
    return stream


# Streams and events: launches queued in order beside the program, and race detection between streams by vector clocks.
#
# A launch comes before another if that one's stream knows of it, through the stream's own
# order, through events, or through the host that waited (rule M15 of docs/semantics/tile.md).


# Vector clocks: launch A happens before launch B if the stream of B knows A, through stream order, an event, or a host
# synchronisation (rule M15 of docs/semantics/tile.md).


HOST_STREAM = 0
StreamClocks = dict[int, int]  # for each stream and the host, how many of its launches are known to happen before


@dataclass(frozen=True)
class ArrayUse:
    """A launch's use of an array: its address range, whether it writes, its stream and its time on that stream.

    The array is kept alive, so that its memory is not reused while the record is valid.
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
    """The happens-before order between the streams of this process."""

    known: dict[int, StreamClocks] = field(default_factory=lambda: {HOST_STREAM: {HOST_STREAM: 0}})
    touched: list[ArrayUse] = field(default_factory=lambda: UNORDERED_USES)
    lock: Any = field(default_factory=RLock)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def stream(self) -> int:
        """Register a new stream and return its number."""
        with self.lock:
            number = next(self.numbers)
            self.known[number] = {number: 0}
            return number

    def snapshot(self, stream: int) -> StreamClocks:
        """A copy of a stream's clock."""
        with self.lock:
            return dict(self.known[stream])

    def learn(self, stream: int, other: StreamClocks) -> None:
        """Join another clock into a stream's clock: what follows on the stream happens after it."""
        with self.lock:
            own = self.known[stream]
            for number, time in other.items():
                own[number] = max(own.get(number, 0), time)
            if stream == HOST_STREAM:  # what the host has synchronised with happens before everything that follows
                self.touched[:] = [t for t in self.touched if own.get(t.stream, 0) < t.time]

    def step(self, stream: int) -> int:
        """Advance a stream's clock by one queued operation and return its time; the host's clock is joined first."""
        with self.lock:
            self.learn(stream, self.known[HOST_STREAM])
            self.known[stream][stream] += 1
            return self.known[stream][stream]

    def launch(self, stream: int, module: Module, arrays: Mapping[str, Any]) -> None:
        """Record a launch on a stream or the host; in debug mode, report unordered uses of the same memory."""
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
            checks.report_finding(_stream_race_finding(met, new))
        if new.stream != HOST_STREAM:  # a launch of the host has ended when it returns
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


_STREAMS: weakref.WeakSet[Stream] = weakref.WeakSet()


def _start_threads() -> None:
    """What a child process does first: the threads of its streams stay with its parent."""
    for stream in list(_STREAMS):
        stream._start_thread()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_threads)


def _wait_or_cancel(wait: Callable[[], Any]) -> Any:
    """Wait for launches; after Ctrl-C every stream stops first, so that no thread goes on using arrays."""
    try:
        return wait()
    except KeyboardInterrupt:
        streams = list(_STREAMS)
        for stream in streams:
            stream._token.cancel()  # all at once: one may wait for an event of another
        for stream in streams:
            stream.cancel()
        raise


class QueuedLaunch:
    """A launch on a stream: `wait()` returns the kernel's result."""

    def __init__(self, task: Future[Any], stream: Stream) -> None:
        self._task, self._stream, self._known = task, stream, LAUNCH_ORDER.snapshot(stream.number)

    def done(self) -> bool:
        """Whether it has ended."""
        return self._task.done()

    def wait(self) -> Any:
        """Wait for the launch and everything before it on its stream, and return its result.

        Raises:
            TesseraError: the launch failed, or one before it on its stream.
        """
        found = _wait_or_cancel(self._task.result)
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
        self._start_thread()
        self._token = CancelToken()
        self._tokens: list[contextvars.Token[Stream | None]] = []
        _STREAMS.add(self)

    def _start_thread(self) -> None:
        """Have a thread for the tasks: one of its own, which a process that is forked has not."""
        self._tasks = ThreadPoolExecutor(1, thread_name_prefix=f"tessera-stream-{self.number}")
        self._lock = Lock()

    def __enter__(self) -> Stream:
        self._tokens.append(CURRENT_STREAM.set(self))
        return self

    def __exit__(self, *_: Any) -> None:
        CURRENT_STREAM.reset(self._tokens.pop())

    def run(self, function: Callable[..., Any], *args: Any, **named: Any) -> QueuedLaunch:
        """Queue a call of a host function; debug mode does not know which arrays it uses."""
        LAUNCH_ORDER.step(self.number)
        return self.queue(lambda: function(*args, **named))

    def queue(self, task: Callable[[], Any]) -> QueuedLaunch:
        """Queue a task whose order has been recorded already."""
        context = contextvars.copy_context()
        context.run(CURRENT_STREAM.set, None)  # a launch inside a task runs synchronously
        context.run(CANCEL_TOKEN.set, self._token)
        return QueuedLaunch(self._tasks.submit(context.run, self._one, task), self)

    def _one(self, task: Callable[[], Any]) -> Any:
        if self.error is not None or self._token.cancelled:
            return None
        try:
            return task()
        except KeyboardInterrupt:  # `cancel` has stopped it
            return None
        except Exception as error:  # the waiting caller raises it
            self.error = error
            return None

    def record(self, event: Event | None = None) -> Event:
        """Record an event: it is complete when everything queued on this stream so far has ended."""
        found = event or Event()
        found._recorded(LAUNCH_ORDER.snapshot(self.number))
        flag = found._flag
        self._tasks.submit(found._happened, self, flag)
        return found

    def wait(self, event: Event) -> None:
        """Make everything queued on this stream from now on run after an event; the program does not wait.

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
        """Wait until everything queued on this stream has ended.

        Raises:
            TesseraError: a launch failed; the stream can be used again.
        """
        known = LAUNCH_ORDER.snapshot(self.number)
        _wait_or_cancel(self._tasks.submit(lambda: None).result)
        LAUNCH_ORDER.learn(HOST_STREAM, known)
        error, self.error = self.error, None
        if error is not None:
            raise error

    def cancel(self) -> None:
        """Stop the launch that runs, drop those queued behind it, and wait until the thread is idle."""
        self._token.cancel()
        ended = self._tasks.submit(lambda: None)
        while not ended.done():
            try:
                time.sleep(1e-3)
            except KeyboardInterrupt:  # it has been cancelled for this reason
                continue
        self._token, self.error = CancelToken(), None

    def __repr__(self) -> str:
        return f"<stream {self.number}>"


class Event:
    """A point in the order of a stream: `stream.record()` creates one, `other.wait(event)` waits for it."""

    def __init__(self) -> None:
        self._flag = Flag()
        self._known: StreamClocks = {}
        self._marked = False
        self._time = 0.0
        self.error: Exception | None = None

    def record(self, stream: Stream | None = None) -> Event:
        """Record the event on a stream (by default that of the `with` block), after all that is queued so far.

        Raises:
            ArgumentError: no stream is named, and none is current.
        """
        found = stream or CURRENT_STREAM.get()
        if found is None:
            message = "there is no stream to record an event on"
            raise ArgumentError(message, location=user_location(), expected="event.record(stream)")
        return found.record(self)

    def done(self) -> bool:
        """Whether the event is complete."""
        return self._flag.is_set()

    def synchronize(self) -> None:
        """Wait until the event is complete.

        Raises:
            ArgumentError: it was never recorded. TesseraError: a launch before it failed.
        """
        self._check()
        _wait_or_cancel(self._flag.wait)
        LAUNCH_ORDER.learn(HOST_STREAM, self._known)
        if self.error is not None:
            raise self.error

    def elapsed_ms(self, later: Event) -> float:
        """Milliseconds from this event to a later one.

        Raises:
            ExecutionError: one of the events is not complete yet.
        """
        if not (self.done() and later.done()):
            raise ExecutionError(
                "an event is not complete yet", location=user_location(), suggestion="later.synchronize()"
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
    """Wait for every stream, and for calls on a device whose kernels may still report a failure.

    Raises:
        TesseraError: a launch failed.
    """
    for stream in sorted(_STREAMS, key=lambda s: s.number):
        stream.synchronize()
    wait_and_examine()
