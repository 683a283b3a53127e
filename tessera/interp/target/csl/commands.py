"""What the host asks of PEs: copies and launches, which each PE takes from its command stream one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tessera.interp.target.csl.faults import CslFault

Place = tuple[int, int]


class Command:
    """One command, and the PEs that have not finished it.

    `cycles` is how long it keeps one PE of a row before the next one's turn; `started` is when the first PE took it,
    `ended` when the last was done.
    """

    def __init__(self, name: str, places: Iterable[Place], cycles: int = 0) -> None:
        self.name, self.left, self.cycles = name, set(places), cycles
        self.started: int | None = None
        self.ended = 0
        self.then: list[Callable[[], None]] = []  # what follows when all are done

    @property
    def done(self) -> bool:
        """Whether every PE has finished it."""
        return not self.left

    def begin(self, stream: Stream) -> bool:
        """Do it on one PE; whether it is over at once."""
        raise NotImplementedError


class Launch(Command):
    """Call an exported function; over on a PE when that calls `unblock_cmd_stream()`."""

    def __init__(self, name: str, places: Iterable[Place], args: tuple[Any, ...]) -> None:
        super().__init__(name, places)
        self.args = args

    def begin(self, stream: Stream) -> bool:
        function = stream.pe.exported(self.name)
        stream.pe.start(function, self.args)
        return False


class CopyIn(Command):
    """Bytes for the memory at a symbol, one row for each PE."""

    def __init__(self, name: str, rows: dict[Place, np.ndarray]) -> None:
        super().__init__(name, rows, max((row.size for row in rows.values()), default=0))
        self.rows = rows

    def begin(self, stream: Stream) -> bool:
        row = self.rows[stream.place].view(np.uint8)
        memory_at(stream, self.name, row.size)[:] = row
        return True


class CopyOut(Command):
    """Bytes from the memory at a symbol; `rows` are filled in place."""

    def __init__(self, name: str, rows: dict[Place, np.ndarray]) -> None:
        super().__init__(name, rows, max((row.size for row in rows.values()), default=0))
        self.rows = rows

    def begin(self, stream: Stream) -> bool:
        row = self.rows[stream.place].view(np.uint8)
        there = memory_from(stream, self.name)[: row.size]
        row[: there.size] = there
        if there.size < row.size:
            stream.notes.append(f"a copy of {row.size} bytes reads past the end of '{self.name}', of {there.size}")
        return True


def memory_from(stream: Stream, name: str) -> np.ndarray:
    """The bytes of a PE's memory from an exported symbol to the end of its variable."""
    pointer = stream.pe.exported(name)
    return pointer.array.reshape(-1).view(np.uint8)[pointer.index * pointer.array.itemsize :]


def memory_at(stream: Stream, name: str, size: int) -> np.ndarray:
    """The bytes of a PE's memory at an exported symbol.

    Raises:
        CslFault: the variable there is shorter.
    """
    memory = memory_from(stream, name)
    if size > memory.size:
        raise CslFault(
            f"a copy of {size} bytes at '{name}' passes the end of its variable",
            expected=f"at most {memory.size} bytes",
            received=f"{size} bytes for PE {stream.place}",
        )
    return memory[:size]


class Stream:
    """The commands that wait at one PE. The next is taken when the one before it is over."""

    def __init__(self, events: Any, pe: Any, place: Place) -> None:
        self.events, self.pe, self.place = events, pe, place
        self.waiting: deque[tuple[int, Command]] = deque()
        self.current: Command | None = None
        self.notes: list[str] = []  # what the machine would let pass, and the user should know
        pe.state["memcpy"] = self

    def add(self, command: Command, time: int) -> None:
        """A command that reaches the PE at `time`."""
        self.waiting.append((time, command))
        if len(self.waiting) == 1 and self.current is None:
            self.events.at(time, self._next)

    def unblock(self, time: int) -> None:
        """Let the next command come: what the library's `unblock_cmd_stream()` does."""
        if self.current is not None:
            self.events.at(time, self._over)

    def _next(self) -> None:
        if self.current is not None or not self.waiting:
            return
        time, command = self.waiting[0]
        if time > self.events.now:
            self.events.at(time, self._next)
            return
        self.waiting.popleft()
        self.current = command
        if command.started is None:
            command.started = self.events.now
        if command.begin(self):
            self._over()

    def _over(self) -> None:
        if self.current is None:
            return  # a second unblock_cmd_stream() for one launch changes nothing
        self.current.left.discard(self.place)
        self.current.ended = self.events.now
        if not self.current.left:
            for call in self.current.then:
                call()
        self.current = None
        self._next()

    def complaint(self) -> str | None:
        """Why this PE takes no command, in words."""
        if not isinstance(self.current, Launch) or not self.pe.idle:
            return None
        return f"PE {self.place}: '{self.current.name}' did not call unblock_cmd_stream()"
