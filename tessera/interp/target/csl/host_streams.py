"""Streams between the host and a color of one PE, without a route: the memcpy library's frame carries them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tessera.interp.target.csl.routes import HOST
from tessera.interp.target.csl.wavelets import WORD

if TYPE_CHECKING:
    from tessera.interp.target.csl.router import Channel

Finished = Callable[[], None]


class Entrance(Protocol):
    """Where words of a stream go in."""

    feeder: Any

    def room(self) -> bool:
        """Whether one more word fits."""

    def add(self, time: int, word: int) -> None:
        """A word that comes at `time`."""


class Gate:
    """The entrance to a router: a stream of an `SdkLayout` comes in like wavelets from a neighbour."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    @property
    def feeder(self) -> Any:
        """Who waits for room."""
        return self.channel.feeders[HOST]

    @feeder.setter
    def feeder(self, feeder: Any) -> None:
        self.channel.feeders[HOST] = feeder

    def room(self) -> bool:
        """Whether one more word fits."""
        return self.channel.room(HOST)

    def add(self, time: int, word: int) -> None:
        """A word that comes at `time`."""
        self.channel.add(HOST, time, word)
        self.channel.wake(time)


class HostSource:
    """Words that the host sends to one PE: they enter a queue of the color as it has room, one a cycle."""

    def __init__(self, queue: Entrance) -> None:
        self.queue, self.time = queue, 0
        self.requests: deque[tuple[deque[int], Finished]] = deque()

    def send(self, words: Iterable[int], start: int, finished: Finished) -> None:
        """Words to send after those already waiting; `finished` is called when the last has gone."""
        self.requests.append((deque(int(word) for word in words), finished))
        self.wake(start)

    def wake(self, time: int) -> None:
        """Hand over as many words as fit."""
        self.time = max(self.time, time)
        while self.requests:
            words, finished = self.requests[0]
            while words and self.queue.room():
                self.time += 1
                self.queue.add(self.time, words.popleft())
            if words:
                self.queue.feeder = self
                return
            self.requests.popleft()
            finished()


class HostSink:
    """Words that a PE sends to the host on one color, and the rows they are for, in the order of the requests."""

    def __init__(self) -> None:
        self.words: deque[int] = deque()
        self.requests: deque[tuple[np.ndarray, Finished]] = deque()

    def receive(self, row: np.ndarray, finished: Finished) -> None:
        """A row to fill; `finished` is called when it is full."""
        self.requests.append((row, finished))
        self.take(())

    def take(self, words: Iterable[int]) -> None:
        """Words that came: fill the rows whose words are all there."""
        self.words.extend(words)
        while self.requests and len(self.words) >= self.requests[0][0].size:
            row, finished = self.requests.popleft()
            row[:] = [self.words.popleft() & WORD for _ in range(row.size)]
            finished()
