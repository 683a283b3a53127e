"""Queues: the input and output queues of a color at a PE, and the host's streams into and out of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tessera.interp.target.csl.fabric.routing import CONTROL_FLAG, HOST, RAMP, WORD_MASK
from tessera.interp.target.csl.fabric.word_buffer import Run, WordBuffer

if TYPE_CHECKING:
    from tessera.interp.target.csl.fabric.router import RouterChannel, RouterNode


# Streams between the host and a color of one PE. They need no route: the memcpy frame carries them.


FinishedCallback = Callable[[], None]


class StreamEntrance(Protocol):
    """The interface that a stream uses to insert words."""

    feeder: Any

    def has_room(self) -> bool:
        """Whether one more word fits."""

    def add(self, time: int, word: int) -> None:
        """Insert a word that arrives at `time`."""


class RouterEntrance:
    """The entrance of a stream into a router: words of an `SdkLayout` stream enter like wavelets from a neighbour."""

    def __init__(self, channel: RouterChannel) -> None:
        self.channel = channel

    @property
    def feeder(self) -> Any:
        """The listener that waits for room."""
        return self.channel.feeders[HOST]

    @feeder.setter
    def feeder(self, feeder: Any) -> None:
        self.channel.feeders[HOST] = feeder

    def has_room(self) -> bool:
        """Whether one more word fits."""
        return self.channel.has_room(HOST)

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
            while words and self.queue.has_room():
                self.time += 1
                self.queue.add(self.time, words.popleft())
            if words:
                self.queue.feeder = self
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


class BackpressureListener(Protocol):
    """A sender that waits for room in a queue."""

    def wake(self, time: int) -> None:
        """Try again at that time."""


def notify_emptied(queue: InputQueue | OutputQueue, call: Callable[[], None] | None) -> None:
    """Call the listeners of an empty queue."""
    if call is not None:
        queue.events.at(queue.events.now, call)


class InputQueue:
    """The words of one color that reached a PE and that its code has not read yet."""

    __slots__ = (
        "_due", "_last", "_slots", "_tell", "color", "controls", "depth", "emptied", "events", "feeder", "granted",
        "limit", "node", "wanted", "whole", "words",
    )  # fmt: skip

    def __init__(self, node: RouterNode, color: int) -> None:
        self.node, self.color = node, color
        self.words = WordBuffer()
        self.depth, self.events = node.fabric.queue_depth(node, "in", color), node.fabric.events
        self.wanted, self.whole = 1, False
        self.limit = self.depth  # the capacity, which a reader that keeps up with the words extends by those it awaits
        self.controls = 0  # the number of control words
        self.granted = 0  # not used: an operation awaits the words of a clear way
        self.emptied: Callable[[], None] | None = None  # to call when no word is left
        self.feeder: BackpressureListener | None = None
        self._due: int | None = None
        self._last = 0
        self._tell, self._slots = self._call, self.events.slots

    def has_room(self) -> bool:
        """Whether one more word fits."""
        return self.words.count < self.limit

    def add(self, time: int, word: int) -> None:
        """Insert a word that arrives at `time`."""
        if time < self._last:
            time = self._last
        self._last = time
        self.words.append(time, word)
        if word > WORD_MASK:
            self.controls += 1
            if self.limit > self.depth:  # it waits for its own reader, with the words behind it
                self.limit = min(self.limit, self.words.count + self.depth - 1)
        self._announce()

    def await_room(self, direction: int, sender: BackpressureListener) -> None:
        """Note that a sender waits for room."""
        self.feeder = sender

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
        self._announce_more()

    def append(self, direction: int, run: Run, count: int) -> None:
        """Insert one run of `count` data words; equal to `extend`."""
        time, words = run
        if time < self._last:
            self.extend(direction, [run], count)
            return
        self._last = time + count - 1
        self.words.runs.append(run)
        self.words.count += count
        self._announce_more()

    def _announce_more(self) -> None:
        """Schedule the notification of words that were inserted, if they are enough; equal to `_announce`."""
        words = self.words
        if self.controls or self.wanted > 1:
            if self.controls or words.count >= self.wanted or not (self.whole or self.wanted <= self.depth):
                self._announce()
            return
        time, due = words.runs[0][0], self._due
        if due is None or time < due:
            calls = self._slots.get(time)
            if calls is not None:  # of the present cycle or a later one
                self._due = time
                calls.append(self._tell)
            elif time < self.events.now:
                self._announce()
            else:
                self._due = time
                self.events.at(time, self._tell)

    def count(self, now: int) -> int:
        """The number of arrived data words before the first control word."""
        words = self.words
        if not words.count:
            return 0
        return words.count if not self.controls and words.last <= now else words.count_until(now, True)

    def take(self, now: int, limit: int) -> list[int]:
        """Remove and return up to `limit` arrived data words."""
        words = self.words
        if not words.count or limit <= 0:
            return []
        if self.controls or len(words.runs) > 1:
            count = words.count if not self.controls and words.last <= now else words.count_until(now, True)
        else:
            time, found = words.runs[0]
            count = now - time + 1 if now - time < len(found) else len(found)
        if count <= 0:
            return []
        found = words.take(count if count < limit else limit)
        if self.limit > self.depth:
            self.limit = max(self.depth, self.limit - len(found))
        if self.feeder is not None or self.emptied is not None or words.count:
            self.wake_senders(now)
        return found

    def take_first(self, now: int) -> int:
        """Remove and return the first word, an arrived data word; equal to `take`."""
        words = self.words
        found = words.pop()
        if self.limit > self.depth:
            self.limit -= 1
        if self.feeder is not None or self.emptied is not None or words.count:
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
        if self.feeder is not None:
            feeder, self.feeder = self.feeder, None
            feeder.wake(now)
        if not self.words.count:
            if self.emptied is not None:
                notify_emptied(self, self.emptied)
                self.emptied = None
        elif self.words.runs[0][0] > now:
            self._announce()

    def want(self, count: int) -> None:
        """Notify the PE only at that many words, at a full queue, or at a control word."""
        self.wanted, self.whole = count, False
        if self.words.count:
            self._announce()

    def await_stream(self, count: int, whole: bool) -> None:
        """`want` for a reader that removes each word in time: the words that it awaits take no room.

        `whole`: notify the PE only when all have arrived; the reader uses their arrival times.
        """
        before, self.limit = self.limit, count + self.depth
        self.wanted, self.whole = count, whole
        if self.words.count:
            self._announce()
        if before < self.limit and self.feeder is not None:
            feeder, self.feeder = self.feeder, None
            feeder.wake(self.events.now)

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
        """The time at which the wanted words have arrived; None if they are not in transit."""
        needed, words = self.wanted, self.words
        if not self.controls:
            if needed == 1:
                return words.runs[0][0] if words.count else None
            if needed > self.depth and not self.whole:
                needed = self.depth
            count = words.count
            if count < needed:
                return None
            return words.last if count == needed else words.find_time(needed)
        if needed > self.depth and not self.whole:
            needed = self.depth
        for index, (time, word) in enumerate(words, 1):
            if index == needed or word & CONTROL_FLAG:
                return time
        return None

    def _call(self) -> None:
        now = self.events.now
        if self._due != now:
            return  # a later schedule replaced this one
        self._due = None
        time = self._find_arrival()
        if time is not None and time <= now:
            self.wanted, self.whole = 1, False
            self.node.pe.receive_wavelet(self.color)
        else:
            self._announce()  # the words were already taken


class OutputQueue:
    """The words of one color that the PE's code wrote and the router has not taken; the ramp carries one word per
    cycle.
    """

    __slots__ = (
        "_again", "_delay", "_due", "_leaving", "_slots", "_watched", "channel", "color", "depth", "emptied", "events",
        "marked", "node", "paced", "sink", "words",
    )  # fmt: skip

    def __init__(self, node: RouterNode, color: int, channel: RouterChannel | None) -> None:
        self.node, self.color, self.channel = node, color, channel
        self.words: list[int] = []
        self.marked = 0  # the number of words that are not plain data
        self.events, self._slots, self._delay = node.fabric.events, node.fabric.events.slots, node.fabric.injection
        self._leaving: deque[int] = deque()  # of a paced queue: the cycles at which slots become free
        self.set_depth(node.fabric.queue_depth(node, "out", color))
        self.sink: HostSink | None = None  # where the host receives a color without a route
        self.emptied: Callable[[], None] | None = None  # to call when no word is left
        self._watched = False
        self._due: int | None = None
        self._again = self._retry

    def set_depth(self, depth: int) -> None:
        """Set the number of words that the queue holds.

        A word keeps its slot until its router has sent it on: a queue of fewer slots than its way has cycles is
        *paced*, it sends less than one word per cycle, and words that are stopped wait here.
        """
        self.depth, self.paced = depth, depth <= self._delay

    def offer(self, words: list[int]) -> int:
        """Accept all words if none waits for a slot, otherwise none; returns how many were accepted."""
        if self.words:
            self._watched = True
            return 0
        if words and max(words) > WORD_MASK:
            self.marked += sum(word > WORD_MASK for word in words)
        elif words and self._pass_on(words):
            return len(words)
        self.words += words
        self._move()
        return len(words)

    def _pass_on(self, words: list[int]) -> bool:
        """Move plain words into the router if it has room for all, and nobody waits for the queue; equal to `_move`."""
        channel, count, node = self.channel, len(words), self.node
        if channel is None or self._watched or self.emptied is not None:
            return False
        now, depth = self.events.now, self.depth
        if depth - channel.inputs[RAMP].count < count:
            return False
        first = (now if now > node.ramp else node.ramp) + 1
        arrival = first + self._delay
        if self.paced:
            leaving = self._leaving
            while leaving and leaving[0] <= now:
                leaving.popleft()
            if depth - len(leaving) < count:
                return False
            leaving.extend(range(arrival, arrival + count))
            if len(leaving) == depth:
                self.wake(leaving[0])
        node.ramp = first + count - 1
        channel.append(RAMP, (arrival, words[:]), count)  # the sender may have the list from a broadcast
        return True

    def collect(self) -> HostSink:
        """Send the words written here to the host."""
        if self.sink is None:
            self.sink = HostSink()
            self.wake(self.events.now)
        return self.sink

    def is_settled(self) -> bool:
        """Whether the writing operation is complete because few enough words are queued; if not, the PE is notified
        later.
        """
        self._watched = bool(self.words)
        return not self._watched

    def is_full(self) -> bool:
        """Whether no slot is free."""
        return bool(self.words) or (self.channel is not None and self.channel.inputs[RAMP].count >= self.depth)

    def wake(self, time: int) -> None:
        """Try again at that time to send words on."""
        if self._due is None or time < self._due:
            self._due = time
            calls = self._slots.get(time)
            if calls is None:
                self.events.at(time, self._again)
            else:
                calls.append(self._again)

    def _retry(self) -> None:
        now = self.events.now
        if self._due != now:
            return
        if self.paced and self._send_next(now):
            if not self.words:
                self._finish()
            return
        self._due = None
        if self.words:
            self._move()

    def _send_next(self, now: int) -> bool:
        """Append one word to those on their way into the router if its slot is free now; equal to `_to_router`.

        Nobody else has the last run of the router's buffer, which therefore may grow.
        """
        leaving, channel, waiting, depth = self._leaving, self.channel, self.words, self.depth
        if channel is None or self.marked or not waiting or len(leaving) < depth or leaving[0] != now:
            return False
        buffer, node, due = channel.inputs[RAMP], self.node, channel.due
        if due is None or not 0 < buffer.count < depth:
            return False
        ramp, runs = node.ramp, buffer.runs
        first = (now if now > ramp else ramp) + 1
        arrival = first + self._delay
        start, moved = runs[-1]
        if start + len(moved) != arrival or moved[0] > WORD_MASK or due > runs[0][0]:
            return False
        node.ramp = first
        leaving.popleft()
        leaving.append(arrival)
        moved.append(waiting.pop(0))
        buffer.count += 1
        self._due = following = leaving[0]
        calls = self._slots.get(following)
        if calls is None:
            self.events.at(following, self._again)
        else:
            calls.append(self._again)
        return True

    def _move(self) -> None:
        if self.channel is None:
            self._to_host()
        else:
            self._to_router(self.channel)
        self._finish()

    def _finish(self) -> None:
        """Tell those who wait for an empty queue."""
        if not self.words and self.emptied is not None:
            notify_emptied(self, self.emptied)
            self.emptied = None
        if self._watched and not self.words:
            self._watched = False
            self.events.at(self.events.now, self._notify_drained)

    def _notify_drained(self) -> None:
        self.node.pe.resume_senders(self.color)

    def _to_router(self, channel: RouterChannel) -> None:
        words = self.words
        waiting = len(words)
        if self.paced and waiting:
            slots = self._count_slots()
            if slots < waiting:
                waiting = slots
        if not waiting:
            return
        node, delay = self.node, self._delay
        free = self.depth - channel.inputs[RAMP].count
        clear = channel.count_accepted(RAMP, waiting) if 0 < free < waiting else 0
        if clear > free:
            free = clear
            channel.granted += min(clear, waiting)
        if free > 0:
            now = self.events.now
            first = (now if now > node.ramp else node.ramp) + 1
            count = free if free < waiting else waiting
            moved = words[:count]
            del words[:count]
            node.ramp = first + count - 1
            if self.paced:
                leaving = self._leaving
                leaving.extend(range(first + delay, first + delay + count))
                if len(leaving) >= self.depth:
                    self.wake(leaving[0])
            self._inject(channel, first + delay, moved)
        if words and free < waiting:
            channel.feeders[RAMP] = self

    def _count_slots(self) -> int:
        """The free slots of a paced queue; if it has none, it tries again when one becomes free."""
        leaving, now = self._leaving, self.events.now
        while leaving and leaving[0] <= now:
            leaving.popleft()
        free = self.depth - len(leaving)
        if not free:
            self.wake(leaving[0])
        return free

    def _inject(self, channel: RouterChannel, time: int, moved: list[int]) -> None:
        """Move words into the router; each that is not plain data is a run of its own."""
        marked = sum(word > WORD_MASK for word in moved) if self.marked else 0
        if not marked:
            channel.append(RAMP, (time, moved), len(moved))
            return
        self.marked -= marked
        channel.extend(RAMP, split_runs(time, moved), len(moved), marked)

    def _to_host(self) -> None:
        if self.sink is not None:
            self.sink.take(self.words)
            self.words, self.marked = [], 0


def split_runs(time: int, words: list[int]) -> list[Run]:
    """The runs of words at consecutive cycles.

    >>> split_runs(5, [1, 2, 1 << 32, 3])
    [(5, [1, 2]), (7, [4294967296]), (8, [3])]
    """
    runs: list[Run] = []
    joins = False
    for word in words:
        plain = word <= WORD_MASK
        if plain and joins:
            runs[-1][1].append(word)
        else:
            runs.append((time, [word]))
        joins, time = plain, time + 1
    return runs
