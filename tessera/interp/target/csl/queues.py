"""The two ends of a color inside a PE: the queue its code reads, and the queue it writes, both finite."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tessera.interp.target.csl.host_streams import HostSink
from tessera.interp.target.csl.routes import RAMP
from tessera.interp.target.csl.wavelets import CONTROL, WORD

if TYPE_CHECKING:
    from tessera.interp.target.csl.router import Channel, Node

Timed = tuple[int, int]  # when a word is there, and the word


class Feeder(Protocol):
    """Whatever waits for room in a queue."""

    def wake(self, time: int) -> None:
        """Try again at that time."""


def told(queue: InputQueue | OutputQueue, call: Callable[[], None] | None) -> None:
    """Call what waited for a queue to be empty."""
    if call is not None:
        queue.events.at(queue.events.now, call)


class InputQueue:
    """Words of one color that reached a PE and that its code has not read."""

    def __init__(self, node: Node, color: int) -> None:
        self.node, self.color = node, color
        self.words: deque[Timed] = deque()
        self.depth, self.events = node.fabric.queue_depth(node, "in", color), node.fabric.events
        self.wanted = 1
        self.controls = 0  # how many of the words are control words
        self.emptied: Callable[[], None] | None = None  # to call when no word is left
        self.feeder: Feeder | None = None
        self._due: int | None = None
        self._last = 0

    def room(self) -> bool:
        """Whether one more word fits."""
        return len(self.words) < self.depth

    def add(self, time: int, word: int) -> None:
        """A word that arrives at `time`."""
        time = max(time, self._last)
        self._last = time
        self.words.append((time, word))
        self.controls += word > WORD
        self._announce()

    def extend(self, words: list[Timed]) -> None:
        """Data words that arrive one after another."""
        if words[0][0] < self._last:
            for time, word in words:
                self.add(time, word)
            return
        self._last = words[-1][0]
        self.words.extend(words)
        self._announce()

    def count(self, now: int) -> int:
        """Data words at the head that have arrived."""
        if self.words and not self.controls and self.words[-1][0] <= now:
            return len(self.words)
        found = 0
        for time, word in self.words:
            if time > now or word & CONTROL:
                break
            found += 1
        return found

    def take(self, now: int, limit: int) -> list[int]:
        """Up to `limit` data words at the head that have arrived, removed."""
        words = self.words
        found: list[int] = []
        if words and not self.controls and len(words) <= limit and words[-1][0] <= now:
            found = [word for _, word in words]
            words.clear()
        while words and len(found) < limit and words[0][0] <= now and not words[0][1] & CONTROL:
            found.append(words.popleft()[1])
        if found:
            self.freed(now)
        return found

    def arrived(self, now: int) -> int:
        """Words of either kind at the head that have arrived."""
        return next((i for i, (time, _) in enumerate(self.words) if time > now), len(self.words))

    def take_any(self, now: int) -> int:
        """The word at the head, removed."""
        word = self.words.popleft()[1]
        self.controls -= word > WORD
        self.freed(now)
        return word

    def take_control(self, now: int) -> None:
        """Remove the control word at the head."""
        self.words.popleft()
        self.controls -= 1
        self.freed(now)

    def freed(self, now: int) -> None:
        """Tell whoever waits that there is room."""
        if self.feeder is not None:
            feeder, self.feeder = self.feeder, None
            feeder.wake(now)
        if not self.words:
            told(self, self.emptied)
            self.emptied = None
        elif self.words[0][0] > now:
            self._announce()

    def want(self, count: int) -> None:
        """Announce words only when so many are there (or the queue is full, or a control word comes)."""
        self.wanted = count
        self._announce()

    def _announce(self) -> None:
        """Plan the next call of `arrived`, unless an earlier or equal one is planned."""
        time = self._complete()
        if time is not None:
            if time < self.events.now:
                time = self.events.now
            if self._due is None or time < self._due:
                self._due = time
                self.events.at(time, self._call)

    def _complete(self) -> int | None:
        """When what is wanted will be there; None while it is not on its way."""
        wanted = self.wanted if self.wanted < self.depth else self.depth
        if not self.controls:
            return self.words[wanted - 1][0] if len(self.words) >= wanted else None
        for index, (time, word) in enumerate(self.words, 1):
            if index == wanted or word & CONTROL:
                return time
        return None

    def _call(self) -> None:
        if self._due != self.events.now:
            return  # a later plan took its place
        self._due = None
        time = self._complete()
        if time is not None and time <= self.events.now:
            self.wanted = 1
            self.node.pe.arrived(self.color)
        else:
            self._announce()  # the words of this plan were taken before


class OutputQueue:
    """Words of one color that the PE's code wrote and the router has not taken: one a cycle goes up the ramp."""

    def __init__(self, node: Node, color: int, channel: Channel | None) -> None:
        self.node, self.color, self.channel = node, color, channel
        self.words: deque[int] = deque()
        self.depth, self.events = node.fabric.queue_depth(node, "out", color), node.fabric.events
        self.sink: HostSink | None = None  # where the host collects a color that has no route
        self.emptied: Callable[[], None] | None = None  # to call when no word is left
        self._watched = False
        self._due: int | None = None

    def offer(self, words: list[int]) -> int:
        """Take all words if fewer than the depth wait here, else none; how many were taken."""
        if len(self.words) >= self.depth:
            self._watched = True
            return 0
        self.words.extend(words)
        self._move()
        return len(words)

    def collect(self) -> HostSink:
        """Send what is written here to the host."""
        if self.sink is None:
            self.sink = HostSink()
            self.wake(self.events.now)
        return self.sink

    def settled(self) -> bool:
        """Whether so few words wait that the operation that wrote them is over; if not, `drained` is called then."""
        self._watched = len(self.words) >= self.depth
        return not self._watched

    def wake(self, time: int) -> None:
        """Try again to hand words over at that time."""
        if self._due is None or time < self._due:
            self._due = time
            self.events.at(time, self._again)

    def _again(self) -> None:
        if self._due == self.events.now:
            self._due = None
            self._move()

    def _move(self) -> None:
        if self.channel is None:
            self._to_host()
        else:
            self._to_router(self.channel)
        if not self.words and self.emptied is not None:
            told(self, self.emptied)
            self.emptied = None
        if self._watched and len(self.words) < self.depth:
            self._watched = False
            self.events.at(self.events.now, self._drained)

    def _drained(self) -> None:
        self.node.pe.drained(self.color)

    def _to_router(self, channel: Channel) -> None:
        node = self.node
        words, free = self.words, channel.depth - len(channel.inputs[RAMP])
        if words and free > 0:
            first = max(self.events.now, node.ramp) + 1
            count = min(free, len(words))
            node.ramp = first + count - 1
            channel.extend(RAMP, [(first + i, words.popleft()) for i in range(count)])
        if words:
            channel.feeders[RAMP] = self

    def _to_host(self) -> None:
        if self.sink is not None:
            self.sink.take(self.words)
            self.words.clear()
