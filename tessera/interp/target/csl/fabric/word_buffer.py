"""Word buffer: the words in transit of a queue as runs of consecutive cycles, which routers move as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tessera.interp.target.csl.fabric.routing import WORD_MASK

# The cycle at which the first word arrives, and the words of it and of the cycles after it. The list is never changed:
# a broadcast shares it. A word that is not plain data (with a flag above its 32 bits) is a run of its own.
Run = tuple[int, list[int]]


class BackpressureListener(Protocol):
    """A sender that waits for room in a queue."""

    def wake(self, time: int) -> None:
        """Try again at that time."""


class WordBuffer:
    """Words in the order of their arrival, each with its cycle.

    `limit` is the number of words that its owner takes from senders, `feeder` the sender that waits for room.

    >>> buffer = WordBuffer()
    >>> buffer.append(5, 7); buffer.extend([(6, [8, 9])], 2)
    >>> list(buffer), len(buffer), buffer.find_time(3)
    ([(5, 7), (6, 8), (7, 9)], 3, 7)
    """

    __slots__ = ("count", "feeder", "limit", "runs")

    def __init__(self, limit: int = 0) -> None:
        # Few runs, in many buffers: a list takes a tenth of a deque's memory, which decides the speed of large grids.
        self.runs: list[Run] = []
        self.count, self.limit = 0, limit
        self.feeder: BackpressureListener | None = None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for time, words in self.runs:
            yield from enumerate(words, time)

    @property
    def last(self) -> int:
        """The cycle of the last word."""
        time, words = self.runs[-1]
        return time + len(words) - 1

    def append(self, time: int, word: int) -> None:
        """Add a word."""
        self.runs.append((time, [word]))
        self.count += 1

    def extend(self, runs: list[Run], count: int) -> None:
        """Add runs of `count` words, which arrive after those of the buffer."""
        self.runs.extend(runs)
        self.count += count

    def find_time(self, position: int) -> int:
        """The cycle of a word; positions begin with 1."""
        for time, words in self.runs:
            if position <= len(words):
                return time + position - 1
            position -= len(words)
        raise AssertionError("the buffer is shorter")

    def count_until(self, now: int, plain: bool) -> int:
        """The number of words that have arrived; those before the first that is not `plain` data."""
        found = 0
        for time, words in self.runs:
            if time > now or (plain and words[0] > WORD_MASK):
                break
            if time + len(words) - 1 > now:
                return found + now - time + 1
            found += len(words)
        return found

    def has_room(self) -> bool:
        """Whether one more word fits."""
        return self.count < self.limit

    def wake_feeder(self, time: int) -> None:
        """Wake the sender that waits for room."""
        feeder = self.feeder
        if feeder is not None:
            self.feeder = None
            feeder.wake(time)

    def pop(self) -> int:
        """Remove and return the first word."""
        time, words = self.runs[0]
        if len(words) > 1:
            self.runs[0] = time + 1, words[1:]
        else:
            del self.runs[0]
        self.count -= 1
        return words[0]

    def take(self, count: int) -> list[int]:
        """Remove and return the first words."""
        runs, left = self.runs, count
        found: list[int] = []
        if count == self.count:
            self.count = 0
            if len(runs) == 1:
                return runs.pop()[1]
            for _, words in runs:
                found += words
            runs.clear()
            return found
        gone = 0
        while left:
            time, words = runs[gone]
            if len(words) > left:
                runs[gone] = time + left, words[left:]
                found += words[:left]
                break
            gone += 1
            left -= len(words)
            found += words
        del runs[:gone]
        self.count -= count
        return found

    def pop_paced(self, count: int, time: int) -> tuple[list[Run], int, int]:
        """Remove up to `count` words before the first that is not plain data; they leave at one a cycle after `time`.

        Returns their runs one cycle after they left, their number, and the cycle in which the last one left.
        """
        runs, left = self.runs, count
        if len(runs) == 1 and count >= self.count and runs[0][1][0] <= WORD_MASK:
            start, words = runs.pop()
            start = start if start > time else time + 1
            count, self.count = self.count, 0
            return [(start + 1, words)], count, start + count - 1
        sent: list[Run] = []
        gone = 0
        while gone < len(runs) and left:
            start, words = runs[gone]
            if words[0] > WORD_MASK:
                break
            if len(words) > left:
                runs[gone] = (start + left, words[left:])
                words = words[:left]
            else:
                gone += 1
            left -= len(words)
            if sent and start <= time + 1:
                begin, before = sent[-1]
                sent[-1] = begin, before + words
                time += len(words)
            else:
                start = start if start > time else time + 1
                sent.append((start + 1, words))
                time = start + len(words) - 1
        del runs[:gone]
        self.count -= count - left
        return sent, count - left, time
