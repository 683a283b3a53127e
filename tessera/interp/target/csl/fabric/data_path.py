"""Data path: what the operations of a PE of WSE-2 share that receive and send at the same time, one word per cycle.

A published study of WSE-2 slides vectors in both directions along a row (docs/csl-cycles.md). Its counts need a PE
whose senders use the cycles in which no word is received. The ramp brings at most one word a cycle to the receivers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tessera.interp.target.csl.fabric.queues import InputQueue
    from tessera.interp.target.csl.fabric.router import RouterNode


class StreamReader:
    """An operation that moves a stream from an input queue into memory, each word in the cycle of its arrival."""

    __slots__ = ("ended", "queue", "since")

    def __init__(self, queue: InputQueue, since: int) -> None:
        self.queue, self.since = queue, since
        self.ended: int | None = None  # the cycle of its end


class DataPath:
    """The data path of one PE. A reader that begins or ends in a cycle does so for senders in the next one."""

    __slots__ = ("node", "readers", "used")

    def __init__(self, node: RouterNode) -> None:
        self.node = node
        self.readers: list[StreamReader] = []
        self.used = -1  # the last cycle in which a word arrived that a reader has removed from its queue

    def open(self, queue: InputQueue, now: int) -> StreamReader:
        """Begin a reader: words that a sender sent ahead of their time are sent one by one from now on."""
        if self.node.ahead is not None:
            self.node.ahead.retract()
        self.readers = [r for r in self.readers if r.ended is None or r.ended >= now]
        reader = StreamReader(queue, now)
        self.readers.append(reader)
        return reader

    def find_free(self, now: int) -> int:
        """The first cycle in which no reader moves a word, as far as is known."""
        free = now + (self.used == now)
        for r in self.readers:
            if r.since < now and (r.ended is None or r.ended >= now):
                free = max(free, _find_gap(r.queue, now))
        return free

    def is_contended(self, now: int) -> bool:
        """Whether several readers are active: the words of one wait on the ramp for those of another."""
        readers = self.readers
        if len(readers) < 2:
            return False
        return sum([r.since < now and (r.ended is None or r.ended >= now) for r in readers]) > 1

    def is_idle(self, now: int) -> bool:
        """Whether no reader is active."""
        readers = self.readers
        return not readers or all([r.ended is not None and r.ended < now for r in readers])


def _find_gap(queue: InputQueue, now: int) -> int:
    """The first cycle from now on in which no word of the present run arrives."""
    for time, words in queue.words.runs:
        if time > now:
            break
        if now < time + len(words):
            return time + len(words)
    return now
