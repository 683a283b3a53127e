"""Output queue: the words of a color that a PE's code wrote, on their way over the ramp into the router."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tessera.interp.target.csl.fabric.queues import HostSink, notify_emptied
from tessera.interp.target.csl.fabric.routing import RAMP, WORD_MASK
from tessera.interp.target.csl.fabric.word_buffer import Run

if TYPE_CHECKING:
    from tessera.interp.target.csl.fabric.router import RouterChannel, RouterNode


MIN_AHEAD = 4  # words from which sending them at once pays off
# Of a paced queue the cycles at which its slots become free; other queues share this empty one.
NO_SLOTS: deque[int] = deque()
SHARED_BURST = 4  # words sent at once where an operation that begins later may share the data path


class OutputQueue:
    """The words of one color that the PE's code wrote and the router has not taken; the ramp carries one word per
    cycle.
    """

    __slots__ = (
        "_again", "_ahead", "_delay", "_due", "_entrance", "_leaving", "_slots", "_watched", "channel", "color",
        "depth", "emptied", "events", "marked", "node", "paced", "sink", "words",
    )  # fmt: skip

    def __init__(self, node: RouterNode, color: int, channel: RouterChannel | None) -> None:
        self.node, self.color = node, color
        self.connect(channel)
        self.words: list[int] = []
        self.marked = 0  # the number of words that are not plain data
        self.events, self._slots, self._delay = node.fabric.events, node.fabric.events.slots, node.fabric.injection
        self._leaving = NO_SLOTS
        self.set_depth(node.fabric.queue_depth(node, "out", color))
        self.sink: HostSink | None = None  # where the host receives a color without a route
        self.emptied: Callable[[], None] | None = None  # to call when no word is left
        self._watched = False
        self._due: int | None = None
        self._ahead = range(0)  # the cycles of the retries of the words sent ahead
        self._again = self._retry

    def connect(self, channel: RouterChannel | None) -> None:
        """Set the router's channel that takes the words, and the buffer that they enter."""
        self.channel = channel
        self._entrance = None if channel is None else channel.inputs[RAMP]

    def set_depth(self, depth: int) -> None:
        """Set the number of words that the queue holds.

        A word keeps its slot until its router has sent it on: a queue of fewer slots than its way has cycles is
        *paced*, it sends less than one word per cycle, and words that are stopped wait here.
        """
        self.depth, self.paced = depth, depth <= self._delay
        if self.paced:
            self._leaving = deque(self._leaving)

    def offer(self, words: list[int]) -> int:
        """Accept all words if none waits for a slot, otherwise none; returns how many were accepted."""
        if self.words:
            self._watched = True
            return 0
        if self.node.ahead is not None:
            self.node.ahead.retract()
        marked = sum([word > WORD_MASK for word in words]) if words and max(words) > WORD_MASK else 0
        if words and self._pass_on(words, marked):
            return len(words)
        self.marked += marked
        self.words += words
        self._move()
        return len(words)

    def offer_command(self, word: int) -> bool:
        """Accept a control wavelet; equal to `offer`."""
        node = self.node
        if self.words or node.ahead is not None or self.paced or node.path is not None:
            return bool(self.offer([word]))
        channel, buffer = self.channel, self._entrance
        if channel is None or buffer is None or self._watched or self.emptied is not None:
            return bool(self.offer([word]))
        if buffer.count >= self.depth:
            self.words.append(word)
            self.marked += 1
            buffer.feeder = self
            return True
        now = self.events.now
        node.ramp = first = (now if now > node.ramp else node.ramp) + 1
        channel.extend(RAMP, [(first + self._delay, [word])], 1, 1)
        return True

    def _pass_on(self, words: list[int], marked: int) -> bool:
        """Move words into the router if it has room for all, and nobody waits for the queue."""
        channel, buffer, count, node = self.channel, self._entrance, len(words), self.node
        if channel is None or buffer is None or self._watched or self.emptied is not None:
            return False
        if node.path is not None and (marked or not node.path.is_idle(self.events.now)):
            return False
        now, depth = self.events.now, self.depth
        if depth - buffer.count < count:
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
        words = words[:]  # the sender may have the list from a broadcast
        if marked:
            channel.extend(RAMP, split_runs(arrival, words), count, marked)
        else:
            if not channel.route.reconfigurable:
                channel.check_direction(RAMP)
            channel.append(buffer, (arrival, words), count)
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
        if self.node.ahead is self:
            self.retract()
        if self._due is None or time < self._due:
            self._schedule(time)

    def _retry(self) -> None:
        now = self.events.now
        if self._due != now:
            return
        if self.node.ahead is self:  # the last of the words sent ahead
            self._mark(None)
            self._schedule(self._leaving[0])
            return
        if self.paced and (self.node.path is None or self.node.path.is_idle(now)):
            if len(self.words) > MIN_AHEAD and self._send_ahead(now):
                return
            if self._send_next(now):
                if not self.words:
                    self._finish()
                return
        self._due = None
        if self.marked and len(self.words) == 1 and not self._watched:
            self.marked = 0
            self.offer_command(self.words.pop())
        elif self.words:
            self._move()

    def _send_next(self, now: int) -> bool:
        """Append one word to those on their way into the router if its slot is free now; equal to `_to_router`.

        Nobody else has the last run of the router's buffer, which therefore may grow.
        """
        leaving, waiting, node, buffer = self._leaving, self.words, self.node, self._entrance
        if buffer is None or node.ramp > now or not waiting or not leaving or leaving[0] != now:
            return False
        runs, arrival, due = buffer.runs, now + 1 + self._delay, self.channel.due  # type: ignore[union-attr]
        if not runs or due is None or due > runs[0][0] or self.marked:
            return False
        start, moved = runs[-1]
        depth = self.depth
        if start + len(moved) != arrival or buffer.count >= depth or len(leaving) < depth or moved[0] > WORD_MASK:
            return False
        node.ramp = now + 1
        leaving.popleft()
        leaving.append(arrival)
        moved.append(waiting.pop(0))
        buffer.count += 1
        self._schedule(leaving[0])
        return True

    def _schedule(self, time: int) -> None:
        """Try again at that time, and not before."""
        self._due = time
        calls = self._slots.get(time)
        if calls is None:
            self.events.at(time, self._again)
        else:
            calls.append(self._again)

    # Words sent ahead of their time: those whose slots become free one after another. The retry of each word would
    # change only the slots, the ramp and the end of the run, at which nobody looks until the router serves the run.
    # Whoever does look retracts the words first.

    def _send_ahead(self, now: int) -> bool:
        """Send words through the slots that become free now and in the next cycles, but not the last word."""
        node, leaving, waiting, buffer = self.node, self._leaving, self.words, self._entrance
        if buffer is None or len(leaving) < self.depth or leaving[0] != now or node.ramp > now or self.marked:
            return False
        count = min(len(waiting) - 1, self.depth - buffer.count)
        while count >= MIN_AHEAD and leaving[count - 1] != now + count - 1:
            count -= 1
        if count < MIN_AHEAD or not self._is_alone(now + count):
            return False
        time, runs = now + 1 + self._delay, buffer.runs
        moved = waiting[:count]
        del waiting[:count]
        for _ in range(count):
            leaving.popleft()
        leaving.extend(range(time, time + count))
        self._ahead, node.ramp = range(now + 1, now + count), now + count
        self._mark(self)
        self._schedule(now + count - 1)
        if runs and runs[-1][0] + len(runs[-1][1]) == time and runs[-1][1][0] <= WORD_MASK:
            runs[-1][1].extend(moved)
            buffer.count += count
        else:
            self.channel.append(buffer, (time, moved), count)  # type: ignore[union-attr]
        return True

    def _is_alone(self, until: int) -> bool:
        """Whether nothing is to look at the words before a cycle: neither the router nor another queue."""
        node, due = self.node, self.channel.due  # type: ignore[union-attr]
        if not node.fabric.streams or (self._entrance.count and (due is None or due < until)):  # type: ignore[union-attr]
            return False
        for queue in node.outputs.values():
            if queue.words and queue is not self:
                return False
        return True

    def _mark(self, ahead: OutputQueue | None) -> None:
        """Name the queue that whoever looks at its words must make retract them."""
        self.node.ahead = self.channel.ahead = ahead  # type: ignore[union-attr]

    def retract(self) -> None:
        """Take back the words sent ahead whose retries are still to come.

        The retry of the present cycle comes before the calls that this cycle added, and after the others.
        """
        now, buffer, leaving, ahead = self.events.now, self._entrance, self._leaving, self._ahead
        assert buffer is not None
        self._mark(None)
        first = max(now + self.events.late, ahead.start)
        count = ahead.stop - first
        if count <= 0:
            self._schedule(leaving[0])
            return
        moved = buffer.runs[-1][1]
        self.words[:0] = moved[-count:]
        del moved[-count:]
        buffer.count -= count
        for time in range(ahead.stop - 1, first - 1, -1):
            leaving.pop()
            leaving.appendleft(time)
        self.node.ramp = first
        self._schedule(first)

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
        words, node, delay = self.words, self.node, self._delay
        waiting = self._count_sendable(channel)
        if not waiting:
            return
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
            _inject(channel, first + delay, moved, self._count_marked(moved))
        if words and free < waiting:
            channel.inputs[RAMP].feeder = self
        elif words and not self.paced:
            self.wake(node.ramp)  # the rest of a longer burst

    def _count_sendable(self, channel: RouterChannel) -> int:
        """The number of waiting words that have slots."""
        waiting = len(self.words)
        if self.paced and waiting:
            waiting = min(waiting, self._count_slots())
        return self._share_path(channel, waiting) if waiting and self.node.path is not None else waiting

    def _share_path(self, channel: RouterChannel, waiting: int) -> int:
        """How many of the waiting words to send at once; beside operations that receive, one word is sent here."""
        if self.node.path.is_idle(self.events.now):  # type: ignore[union-attr]
            return min(waiting, SHARED_BURST)
        self._send_between(channel)
        return 0

    def _send_between(self, channel: RouterChannel) -> None:
        """Send one word if no operation of the PE receives one in this cycle, and try again in the next."""
        node, now = self.node, self.events.now
        if channel.inputs[RAMP].count >= self.depth:
            channel.inputs[RAMP].feeder = self
            return
        free = max(node.ramp, node.path.find_free(now))  # type: ignore[union-attr]
        if free > now:
            self.wake(free)
            return
        node.ramp, arrival = now + 1, now + 1 + self._delay
        if self.paced:
            self._leaving.append(arrival)
        moved = [self.words.pop(0)]
        _inject(channel, arrival, moved, self._count_marked(moved))
        if self.words:
            self.wake(now + 1)

    def _count_slots(self) -> int:
        """The free slots of a paced queue; if it has none, it tries again when one becomes free."""
        leaving, now = self._leaving, self.events.now
        while leaving and leaving[0] <= now:
            leaving.popleft()
        free = self.depth - len(leaving)
        if not free:
            self.wake(leaving[0])
        return free

    def _count_marked(self, moved: list[int]) -> int:
        """How many of the words that leave the queue are not plain data."""
        marked = sum([word > WORD_MASK for word in moved]) if self.marked else 0
        self.marked -= marked
        return marked

    def _to_host(self) -> None:
        if self.sink is not None:
            self.sink.take(self.words)
            self.words, self.marked = [], 0


def _inject(channel: RouterChannel, time: int, moved: list[int], marked: int) -> None:
    """Move words into the router; each of the `marked` ones that are not plain data is a run of its own."""
    if marked:
        channel.extend(RAMP, split_runs(time, moved), len(moved), marked)
    else:
        channel.check_direction(RAMP)
        channel.append(channel.inputs[RAMP], (time, moved), len(moved))


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
