"""Stream reading: operations that move one stream from the fabric into memory."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

from tessera.interp.target.csl.fabric.queues import InputQueue
from tessera.interp.target.csl.pe.pe_state import PeState, WaitCondition

StoreElements = Callable[[int, int], Any]


class StreamReceiver(Protocol):
    """The fabric source of an operation into memory that has no other."""

    pe: PeState
    queue: InputQueue
    waiting: WaitCondition

    def ready(self, count: int) -> int:
        """The number of elements that can be read now, up to `count`."""

    def wait(self, count: int) -> WaitCondition:
        """The condition to wait for when none is ready."""


def read_stream(
    s: StreamReceiver, store: StoreElements, count: int, width: int, lag: int
) -> Generator[Any, None, bool]:
    """Read a stream; the operation ends `lag` cycles after it has read the last word."""
    events, path, done = s.pe.events, s.pe.fabric.node.path, 0
    reader = None if path is None else path.open(s.queue, events.now)
    while done < count:
        step = s.ready(count - done)
        if step:
            end = events.now - (-step // width)
        elif s.queue.controls:
            yield s.wait(count - done)
            continue
        else:
            step, end = yield from _await_rest(s, count - done, width)
            if not step:
                continue
        if path is not None and s.queue.words.find_time(step) == events.now:
            path.used = events.now
        store(done, step)
        done += step
        yield end + lag if done == count else end
    if reader is not None:
        reader.ended = events.now - lag
    return True


def _await_rest(s: StreamReceiver, count: int, width: int) -> Generator[Any, None, tuple[int, int]]:
    """Wait for the rest of a stream; its words and their end if all have arrived.

    With the plain execution of `Simulation(lockstep=False)` the operation continues step by step.
    """
    whole = s.pe.fabric.node.fabric.streams
    s.queue.await_stream(count, whole)
    yield s.waiting
    if not whole or s.queue.count(s.queue.events.now) < count:
        return 0, 0
    return count, find_stream_end(s.queue, count, width)


def find_stream_end(queue: InputQueue, count: int, width: int) -> int:
    """The cycle at which an operation ends that removes the words of a queue in steps as they arrive."""
    arrivals, done, time = queue.list_arrivals(count), 0, 0
    while done < count:
        first = done
        if arrivals[done] > time:  # it waits until the queue is full, or holds the rest
            time = arrivals[min(done + queue.depth, count) - 1]
        while done < count and arrivals[done] <= time:
            done += 1
        time += -(-(done - first) // width)
    return time
