"""Stream reading: operations that move one stream from the fabric into memory, whole or word by word."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any, Protocol

from tessera.interp.target.csl.fabric.data_path import DataPath, StreamReader
from tessera.interp.target.csl.fabric.queues import InputQueue
from tessera.interp.target.csl.pe.pe_state import PeState, WaitCondition

StoreElements = Callable[[int, int], Any]


class Stream(Protocol):
    """The fabric source of an operation into memory that has no other."""

    pe: PeState
    queue: InputQueue
    waiting: WaitCondition

    def ready(self, count: int) -> int:
        """The number of elements that can be read now, up to `count`."""

    def wait(self, count: int) -> WaitCondition:
        """The condition to wait for when none is ready."""


def read_stream(s: Stream, store: StoreElements, done: int, count: int, width: int) -> Generator[Any, None, bool]:
    """Wait for the rest of a stream, and store it at once if all words have arrived; whether they have.

    With the plain execution of `Simulation(lockstep=False)` the operation continues step by step.
    """
    whole = s.pe.fabric.node.fabric.streams
    s.queue.await_stream(count - done, whole)
    yield s.waiting
    if not whole or s.queue.count(s.queue.events.now) < count - done:
        return False
    _, end = find_progress(s.queue, count - done, width, math.inf)
    store(done, count - done)
    yield end
    return True


def find_progress(queue: InputQueue, count: int, width: int, now: float) -> tuple[int, int]:
    """What an operation has done that removes the words of a queue in steps as they arrive.

    Returns the words that it has removed by a cycle, and until when it is busy.
    """
    arrivals, done, time = queue.list_arrivals(count), 0, 0
    while done < len(arrivals) and time <= now:
        first, full = done, min(done + queue.depth, count) - 1
        if arrivals[done] > time:  # it waits until the queue is full, or holds the rest
            if full >= len(arrivals) or arrivals[full] > now:
                break
            time = arrivals[full]
        while done < len(arrivals) and arrivals[done] <= time:
            done += 1
        time += -(-(done - first) // width)
    return done, time


def read_in_turn(
    s: Stream, store: StoreElements, count: int, width: int, path: DataPath
) -> Generator[Any, None, bool]:
    """Read a stream on a PE whose operations share its data path: word by word while another reader is active."""
    events, done = s.pe.events, 0
    reader = path.open(s.queue, events.now)
    while done < count:
        if path.is_contended(reader, events.now):
            done += yield from _read_word(s, store, done, reader, path)
            continue
        reader.stepping = reader.asking = False
        step = s.ready(count - done)
        if step:
            done += yield from _read_step(s, store, done, step, width, path)
        elif s.queue.controls:
            yield s.wait(count - done)
        else:
            done += yield from _read_rest(s, store, done, count, width, path)
    path.close(reader, events.now)
    return True


def _read_word(
    s: Stream, store: StoreElements, done: int, reader: StreamReader, path: DataPath
) -> Generator[Any, None, int]:
    """Read one word if it has arrived and it is this reader's turn; the number of words read."""
    now, words = s.pe.events.now, s.queue.words
    reader.stepping, words.limit = True, s.queue.depth
    if not s.ready(1):
        yield s.wait(1)
        return 0
    turn = path.take_turn(reader, now)
    if turn:
        store(done, 1)
    yield now + 1
    return int(turn)


def _read_step(
    s: Stream, store: StoreElements, done: int, step: int, width: int, path: DataPath
) -> Generator[Any, None, int]:
    """Read the words that have arrived; their number."""
    _mark_arrival(s, step, path)
    store(done, step)
    yield s.pe.events.now - (-step // width)
    return step


def _read_rest(
    s: Stream, store: StoreElements, done: int, count: int, width: int, path: DataPath
) -> Generator[Any, None, int]:
    """Wait for the rest of a stream, or for a reader that begins; the number of words read by then."""
    queue, events = s.queue, s.pe.events
    whole, left = s.pe.fabric.node.fabric.streams, count - done
    queue.await_stream(left, whole)
    yield s.waiting
    if not whole:
        return 0
    now, complete = events.now, queue.count(events.now) >= left
    step, end = find_progress(queue, left, width, math.inf if complete else now)
    queue.wanted, queue.whole = 1, False
    if step:
        _mark_arrival(s, step, path)
        store(done, step)
    if complete or end > now:
        yield end
    else:
        queue.await_stream(left - step, False)
        yield s.waiting
    return step


def _mark_arrival(s: Stream, step: int, path: DataPath) -> None:
    """Note that the last of the words to read arrives in this cycle, and takes the data path."""
    now = s.pe.events.now
    if s.queue.words.find_time(step) == now:
        path.used = now
