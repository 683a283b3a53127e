"""Data path: what the operations of a PE that receive and send at the same time share, one word per cycle.

A published study of WSE-2 (docs/csl-cycles.md) slides vectors in both directions along a row. Its counts need a PE
whose receiving operations take turns, and whose senders use the cycles in which no word is received.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tessera.interp.target.csl.fabric.queues import InputQueue
    from tessera.interp.target.csl.fabric.router import RouterNode


class StreamReader:
    """An operation that moves a stream from an input queue into memory."""

    __slots__ = ("asking", "ended", "last", "queue", "since", "stepping")

    def __init__(self, queue: InputQueue, since: int) -> None:
        self.queue, self.since = queue, since
        self.ended: int | None = None  # the cycle of its end
        self.last = -1  # the cycle of its last turn
        self.asking = False  # whether it found the data path taken, and asks again in the next cycle
        self.stepping = False  # whether it moves one word at a time, in turn with others


class DataPath:
    """The data path of one PE. What begins or ends in a cycle takes effect in the next one."""

    __slots__ = ("node", "readers", "used")

    def __init__(self, node: RouterNode) -> None:
        self.node = node
        self.readers: list[StreamReader] = []
        self.used = -1  # the last cycle in which a reader moved a word

    def open(self, queue: InputQueue, now: int) -> StreamReader:
        """Begin a reader; one that waits for its whole stream continues step by step."""
        if self.node.ahead is not None:
            self.node.ahead.retract()
        self.readers = [r for r in self.readers if r.ended is None or r.ended >= now]
        for other in self.readers:
            if other.ended is None and other.queue.whole:
                self.node.pe.receive_wavelet(other.queue.color)
        reader = StreamReader(queue, now)
        self.readers.append(reader)
        return reader

    def close(self, reader: StreamReader, now: int) -> None:
        """End a reader."""
        reader.ended, reader.asking = now, False

    def is_contended(self, reader: StreamReader, now: int) -> bool:
        """Whether another reader is active."""
        if len(self.readers) == 1:
            return False
        return any([r is not reader and r.since < now and (r.ended is None or r.ended >= now) for r in self.readers])

    def take_turn(self, reader: StreamReader, now: int) -> bool:
        """Whether a reader may move a word in this cycle: the one that waited longest goes first."""
        if self.used == now or any([r.asking and r.last < reader.last for r in self.readers if r is not reader]):
            reader.asking = True
            return False
        self.used = reader.last = now
        reader.asking = False
        return True

    def is_taken(self, now: int) -> bool:
        """Whether a reader moves a word in this cycle. Senders ask, after the readers."""
        if self.used == now:
            return True
        for r in self.readers:
            if r.since < now and (r.ended is None or r.ended >= now) and _has_word(r, now):
                return True
        return False

    def is_idle(self, now: int) -> bool:
        """Whether no reader is active."""
        readers = self.readers
        return not readers or all([r.ended is not None and r.ended < now for r in readers])


def _has_word(reader: StreamReader, now: int) -> bool:
    """Whether a word arrives now; for a reader in turn with others also one that has arrived."""
    for time, words in reader.queue.words.runs:
        if time > now:
            return False
        if reader.stepping or now < time + len(words):
            return True
    return False
