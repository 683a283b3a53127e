"""Queues: the input queue of a color at a PE, and the host's streams. `output_queue` has the output queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tessera.interp.target.csl.fabric.routing import CONTROL_FLAG, HOST, RAMP, WORD_MASK
from tessera.interp.target.csl.fabric.word_buffer import Run, WordBuffer

if TYPE_CHECKING:
    from tessera.interp.target.csl.fabric.output_queue import OutputQueue
    from tessera.interp.target.csl.fabric.router import RouterChannel, RouterNode


# Streams between the host and a color of one PE. They need no route: the memcpy frame carries them.


FinishedCallback = Callable[[], None]


class StreamEntrance(Protocol):
    """The interface that a stream uses to insert words."""

    words: WordBuffer

    def add(self, time: int, word: int) -> None:
        """Insert a word that arrives at `time`."""


class RouterEntrance:
    """The entrance of a stream into a router: words of an `SdkLayout` stream enter like wavelets from a neighbour."""

    def __init__(self, channel: RouterChannel) -> None:
        self.channel, self.words = channel, channel.inputs[HOST]

    def add(self, time: int, word: int) -> None:
        """Insert a word that arrives at `time`."""
        self.channel.add(HOST, time, word)
        self.channel.wake(time)


class HostSource:
    """Words that the host sends to one PE: they enter a queue of the color at one word per cycle while it has room."""

    def __init__(self, queue: StreamEntrance) -> None:
        self.queue, self.time = queue, 0
        self.requests: deque[tuple[deque[int], FinishedCallback]] = deque()

    def send(self, words: Iterable[int], start: int, finished: FinishedCallback) -> None:
        """Append words to send; `finished` is called when the last word has entered the queue."""
        self.requests.append((deque(int(word) for word in words), finished))
        self.wake(start)

    def wake(self, time: int) -> None:
        """Insert as many words as fit."""
        self.time = max(self.time, time)
        while self.requests:
            words, finished = self.requests[0]
            while words and self.queue.words.has_room():
                self.time += 1
                self.queue.add(self.time, words.popleft())
            if words:
                self.queue.words.feeder = self
                return
            self.requests.popleft()
            finished()


class HostSink:
    """Words that a PE sends to the host on one color, and the rows to fill, in the order of the requests."""

    def __init__(self) -> None:
        self.words: deque[int] = deque()
        self.requests: deque[tuple[np.ndarray, FinishedCallback]] = deque()

    def receive(self, row: np.ndarray, finished: FinishedCallback) -> None:
        """Request words for a row; `finished` is called when the row is full."""
        self.requests.append((row, finished))
        self.take(())

    def take(self, words: Iterable[int]) -> None:
        """Accept words, and fill the rows whose words are complete."""
        self.words.extend(words)
        while self.requests and len(self.words) >= self.requests[0][0].size:
            row, finished = self.requests.popleft()
            row[:] = [self.words.popleft() & WORD_MASK for _ in range(row.size)]
            finished()


# The queues of a color at a PE: its code reads the input queue and writes the output queue. Both are finite.


def notify_emptied(queue: InputQueue | OutputQueue, call: Callable[[], None] | None) -> None:
    """Call the listeners of an empty queue."""
    if call is not None:
        queue.events.at(queue.events.now, call)


class InputQueue:
    """The words of one color that reached a PE and that its code has not read yet."""

    __slots__ = (
        "_due", "_last", "_needed", "_slots", "_tell", "color", "controls", "depth", "emptied", "events", "granted",
        "node", "relay", "whole", "words",
    )  # fmt: skip

    def __init__(self, node: RouterNode, color: int) -> None:
        self.node, self.color = node, color
        self.depth, self.events = node.fabric.queue_depth(node, "in", color), node.fabric.events
        self.words = WordBuffer(self.depth)  # a reader that keeps up with the words extends its limit
        self._needed, self.whole = 1, False  # the words to wait for, and whether they are the whole of a stream
        self.controls = 0  # the number of control words
        self.granted = 0  # not used: an operation awaits the words of a clear way
        self.emptied: Callable[[], None] | None = None  # to call when no word is left
        # What takes the words for a thread that waits for them; whether the thread goes on waiting.
        self.relay: Callable[[], bool] | None = None
        self._due: int | None = None
        self._last = 0  # the time of the last word that was inserted
        self._tell, self._slots = self._call, self.events.slots

    def add(self, time: int, word: int) -> None:
        """Insert a word that arrives at `time`."""
        if time < self._last:
            time = self._last
        self._last = time
        self.words.append(time, word)
        if word > WORD_MASK:
            self.controls += 1
            if self.words.limit > self.depth:  # it waits for its own reader, with the words behind it
                self.words.limit = min(self.words.limit, self.words.count + self.depth - 1)
        self._announce()

    def extend(self, direction: int, runs: list[Run], count: int) -> None:
        """Insert runs of `count` data words."""
        if runs[0][0] < self._last:
            for start, words in runs:
                for time, word in enumerate(words, start):
                    self.add(time, word)
            return
        time, words = runs[-1]
        self._last = time + len(words) - 1
        self.words.runs += runs
        self.words.count += count
        self._announce()

    def append(self, words: WordBuffer, run: Run, count: int) -> None:
        """Insert one run of `count` data words into the queue's buffer; equal to `extend`."""
        time = run[0]
        if time < self._last:
            self.extend(RAMP, [run], count)
            return
        self._last = last = time + count - 1
        words.runs.append(run)
        words.count = count = words.count + count
        needed, due = self._needed, self._due
        if self.controls:
            self._announce()
        elif count >= needed:
            if needed == 1:
                last = words.runs[0][0]
            elif count != needed:
                last = words.find_time(needed)
            if due is None or last < due:
                calls = self._slots.get(last)
                if calls is None:
                    self._announce()
                else:  # of the present cycle or a later one
                    self._due = last
                    calls.append(self._tell)

    def count(self, now: int) -> int:
        """The number of arrived data words before the first control word."""
        words = self.words
        if not words.count:
            return 0
        return words.count if not self.controls and self._last <= now else words.count_until(now, True)

    def take(self, now: int, limit: int) -> list[int]:
        """Remove and return up to `limit` arrived data words."""
        words = self.words
        if not words.count or limit <= 0:
            return []
        count = words.count
        if self.controls or self._last > now:
            count = words.count_until(now, True)
            if count <= 0:
                return []
        if count == words.count <= limit and len(words.runs) == 1:  # the whole of one run
            found = words.runs.pop()[1]
            words.count = 0
        else:
            found = words.take(count if count < limit else limit)
        if words.limit > self.depth:
            words.limit = max(self.depth, words.limit - len(found))
        feeder = words.feeder
        if feeder is not None:
            words.feeder = None
            feeder.wake(now)
        if words.count or self.emptied is not None:
            self.wake_senders(now)
        return found

    def take_first(self, now: int) -> int:
        """Remove and return the first word, an arrived data word; equal to `take`."""
        words = self.words
        found = words.pop()
        if words.limit > self.depth:
            words.limit -= 1
        if words.feeder is not None or self.emptied is not None or words.count:
            self.wake_senders(now)
        return found

    def count_arrived(self, now: int) -> int:
        """The number of arrived words of both kinds."""
        return self.words.count_until(now, False)

    def take_any(self, now: int) -> int:
        """Remove and return the first word."""
        word = self.words.pop()
        self.controls -= word > WORD_MASK
        self.wake_senders(now)
        return word

    def is_control_next(self, now: int) -> bool:
        """Whether the first word has arrived and is a control word."""
        if not self.controls:
            return False
        time, words = self.words.runs[0]
        return time <= now and bool(words[0] & CONTROL_FLAG)

    def take_control(self, now: int) -> None:
        """Remove the first word, a control word."""
        self.words.pop()
        self.controls -= 1
        self.wake_senders(now)
        if self.words.count:
            self._announce()  # the words behind it waited for it

    def wake_senders(self, now: int) -> None:
        """Wake the senders that wait for room."""
        self.words.wake_feeder(now)
        if not self.words.count:
            if self.emptied is not None:
                notify_emptied(self, self.emptied)
                self.emptied = None
        elif self.words.runs[0][0] > now:
            self._announce()

    def want(self, count: int) -> None:
        """Notify the PE only at that many words, at a full queue, or at a control word."""
        self._needed, self.whole = count if count < self.depth else self.depth, False
        if self.words.count:
            self._announce()

    def await_stream(self, count: int, whole: bool) -> None:
        """`want` for a reader that removes each word in time: the words that it awaits take no room.

        `whole`: notify the PE only when all have arrived; the reader uses their arrival times.
        """
        words = self.words
        before, words.limit = words.limit, count + self.depth
        self._needed, self.whole = count if whole or count < self.depth else self.depth, whole
        if words.count:
            self._announce()
        if before < words.limit:
            words.wake_feeder(self.events.now)

    def list_arrivals(self, count: int) -> list[int]:
        """The arrival times of the first words."""
        return [time for time, _ in islice(self.words, count)]

    def peek(self, now: int) -> int | None:
        """The first word with its flags, if it has arrived."""
        if not self.words.count:
            return None
        time, words = self.words.runs[0]
        return words[0] if time <= now else None

    def _announce(self) -> None:
        """Schedule the next notification of the PE, unless an earlier or equal one is scheduled."""
        time, events, due = self._find_arrival(), self.events, self._due
        if time is not None and (due is None or time < due):
            if time < events.now:
                time = events.now
                if time == due:
                    return
            self._due = time
            events.at(time, self._tell)

    def _find_arrival(self) -> int | None:
        """The time at which the needed words have arrived; None if they are not in transit."""
        needed, words = self._needed, self.words
        if not self.controls:
            count = words.count
            if count < needed:
                return None
            if needed == 1:
                return words.runs[0][0]
            return self._last if count == needed else words.find_time(needed)
        for index, (time, word) in enumerate(words, 1):
            if index == needed or word & CONTROL_FLAG:
                return time
        return None

    def _call(self) -> None:
        now = self.events.now
        if self._due != now:
            return  # a later schedule replaced this one
        self._due = None
        words, needed = self.words, self._needed
        if not self.controls and needed <= words.count:  # as `_find_arrival`
            first, found = words.runs[0]
            arrived = first + needed - 1 <= now if needed <= len(found) else words.find_time(needed) <= now
        else:
            time = self._find_arrival()
            arrived = time is not None and time <= now
        if arrived:
            self._needed, self.whole = 1, False
            if self.relay is not None:
                if self.relay():
                    return
                self.relay = None
            self.node.pe.receive_wavelet(self.color)
        else:
            self._announce()  # the words were already taken
