"""Simulation: loads a program onto its grid of PEs, executes the host's commands, advances the clock, reports a stall.

Commands are copies and launches; each PE takes them from its command stream in order.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import numpy as np

from tessera.core.errors import ArgumentError
from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.fabric.queues import HostSource, RouterEntrance
from tessera.interp.target.csl.fabric.router_grid import Fabric
from tessera.interp.target.csl.fabric.routing import HOST
from tessera.interp.target.csl.pe.lockstep_execution import form_lockstep_groups
from tessera.interp.target.csl.pe.pe_state import EventQueue, without_collection
from tessera.interp.target.csl.pe.processing_element import Pe
from tessera.interp.target.csl.pe.product_loops import refuse_products
from tessera.interp.target.csl.pe.scheduler import describe_waits, is_idle
from tessera.interp.target.csl.sema.values import Pointer
from tessera.interp.target.csl.text.diagnostics import CslFault

# Host commands.

PeCoordinate = tuple[int, int]


class HostCommand:
    """One command, and the PEs that have not completed it.

    `cycles` is the time it occupies one PE of a row before the next PE; `started` is the cycle at which the first PE
    took it, `ended` that at which the last PE completed it.
    """

    def __init__(self, name: str, places: Iterable[PeCoordinate], cycles: int = 0) -> None:
        self.name, self.left, self.cycles = name, set(places), cycles
        self.started: int | None = None
        self.ended = 0
        self.then: list[Callable[[], None]] = []  # calls after all PEs have completed it

    @property
    def done(self) -> bool:
        """Whether every PE has completed it."""
        return not self.left

    def begin(self, stream: CommandStream) -> bool:
        """Execute the command on one PE; returns whether it is complete at once."""
        raise NotImplementedError


class LaunchCommand(HostCommand):
    """The call of an exported function; complete on a PE when the PE calls `unblock_cmd_stream()`."""

    def __init__(self, name: str, places: Iterable[PeCoordinate], args: tuple[Any, ...]) -> None:
        super().__init__(name, places)
        self.args = args

    def begin(self, stream: CommandStream) -> bool:
        function = stream.pe.get_export(self.name)
        stream.pe.start(function, self.args)
        return False


class CopyInCommand(HostCommand):
    """A copy of bytes to the memory at a symbol, one row for each PE."""

    def __init__(self, name: str, rows: dict[PeCoordinate, np.ndarray]) -> None:
        super().__init__(name, rows, max((row.size for row in rows.values()), default=0))
        self.rows = rows

    def begin(self, stream: CommandStream) -> bool:
        row = self.rows[stream.place].view(np.uint8)
        find_bounded_memory(stream, self.name, row.size)[:] = row
        return True


class CopyOutCommand(HostCommand):
    """A copy of bytes from the memory at a symbol into `rows`."""

    def __init__(self, name: str, rows: dict[PeCoordinate, np.ndarray]) -> None:
        super().__init__(name, rows, max((row.size for row in rows.values()), default=0))
        self.rows = rows

    def begin(self, stream: CommandStream) -> bool:
        row = self.rows[stream.place].view(np.uint8)
        memory = find_symbol_memory(stream, self.name)[: row.size]
        row[: memory.size] = memory
        if memory.size < row.size:
            stream.notes.append(f"a copy of {row.size} bytes reads past the end of '{self.name}', of {memory.size}")
        return True


def find_symbol_memory(stream: CommandStream, name: str) -> np.ndarray:
    """The bytes of a PE's memory from an exported symbol to the end of its variable."""
    pointer = stream.pe.get_export(name)
    if not isinstance(pointer, Pointer):
        raise CslFault(f"'{name}' is copied, but it is no variable", expected="an exported array or pointer")
    array, index = pointer
    flat = array if array.ndim == 1 else array.reshape(-1)
    return flat.view(np.uint8)[index * array.itemsize :]  # type: ignore[no-any-return]


def find_bounded_memory(stream: CommandStream, name: str, size: int) -> np.ndarray:
    """The bytes of a PE's memory at an exported symbol.

    Raises:
        CslFault: the variable there is shorter.
    """
    memory = find_symbol_memory(stream, name)
    if size > memory.size:
        raise CslFault(
            f"a copy of {size} bytes at '{name}' passes the end of its variable",
            expected=f"at most {memory.size} bytes",
            received=f"{size} bytes for PE {stream.place}",
        )
    return memory[:size]


class CommandStream:
    """The queued commands of one PE. The PE takes the next command when the previous one is complete."""

    def __init__(self, events: Any, pe: Any, place: PeCoordinate) -> None:
        self.events, self.pe, self.place = events, pe, place
        self.waiting: deque[tuple[int, HostCommand]] = deque()
        self.current: HostCommand | None = None
        self.notes: list[str] = []  # notes on copies that the machine accepts silently
        pe.state["memcpy"] = self

    def add(self, command: HostCommand, time: int) -> None:
        """Add a command that arrives at `time`."""
        self.waiting.append((time, command))
        if len(self.waiting) == 1 and self.current is None:
            self.events.at(time, self._next)

    def unblock(self, time: int) -> None:
        """Complete the present command: the library's `unblock_cmd_stream()`."""
        if self.current is not None:
            self.events.at(time, self._complete)

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
            self._complete()

    def _complete(self) -> None:
        if self.current is None:
            return  # a second unblock_cmd_stream() for one launch changes nothing
        self.current.left.discard(self.place)
        self.current.ended = self.events.now
        if not self.current.left:
            for call in self.current.then:
                call()
        self.current = None
        if self.waiting:
            self._next()

    def explain_block(self) -> str | None:
        """Why this PE takes no command, or None."""
        if not isinstance(self.current, LaunchCommand) or not is_idle(self.pe):
            return None
        return f"PE {self.place}: '{self.current.name}' did not call unblock_cmd_stream()"


# The simulation.

CYCLE_LIMIT = 10**9  # the cycle at which a run becomes a fault
RECENT_TASKS = 1000  # of the whole grid, among which a stall report looks for tasks that run again and again
MAX_REPORT_LINES = 12  # the maximum number of lines in a stall report


class Simulation:
    """One run of a compiled program.

    Args:
        layout: the result of `compile_program`.
        seed: shuffles the order of events of one cycle and the links' delays, to expose races; None: a fixed order.
        depth: the capacity of each of the fabric's queues in words.
        limit: the last cycle; a longer run is a fault.
        lockstep: whether PEs of one program execute equal tasks in lockstep, or one after another. Both modes give the
            same values, cycles and order of events.

    Raises:
        CslFault: from `wait` and every other call that advances the clock, for a fault of the program.
    """

    def __init__(
        self,
        layout: Any,
        seed: int | None = None,
        depth: int | None = None,
        limit: int = CYCLE_LIMIT,
        lockstep: bool = True,
    ) -> None:
        self.layout, self.limit = layout, limit
        self.events = EventQueue(seed)
        with without_collection():
            self.fabric = Fabric(self.events, layout.width, layout.height, layout.colors, seed, depth, layout.arch)
        self.fabric.streams &= lockstep
        self.pes: dict[PeCoordinate, Any] = {}
        self.streams: dict[PeCoordinate, CommandStream] = {}
        self.launches: list[LaunchCommand] = []
        self._last_in: HostCommand | None = None
        self._busy = 0  # the cycle until which the channel from the host is busy
        self._gap = COSTS.stream  # cycles before the next transfer
        self.sources: dict[tuple[PeCoordinate, int], HostSource] = {}
        self.timeline: list[tuple[PeCoordinate, str, int, int]] = []
        self.lockstep_groups = form_lockstep_groups(tile.program for tile in layout.tiles.values()) if lockstep else {}
        with without_collection():
            for place, tile in layout.tiles.items():
                self._place(place, tile.program)
        if not lockstep:
            for pe in self.pes.values():
                refuse_products(pe.space)

    def _place(self, place: PeCoordinate, program: Any) -> None:
        pe = Pe(program, *place, self.events, self.fabric.view(*place), self.lockstep_groups.get(id(program)))
        pe.trace = lambda name, start, end: self.timeline.append((place, name, start, end))
        self.fabric.nodes[place].pe = self.pes[place] = pe
        pe.limit = self.limit
        self.streams[place] = CommandStream(self.events, pe, place)

    def boot(self) -> None:
        """Start every PE: run the tasks that comptime blocks activated."""
        for pe in self.pes.values():
            pe.boot()

    @property
    def cycles(self) -> int:
        """The present cycle."""
        return self.events.now

    def _schedule_transfer(self, places: Iterable[PeCoordinate], words: int) -> dict[PeCoordinate, int]:
        """The arrival cycle of each PE's part of a transfer. Rows are parallel; in a row PEs follow one another from
        the west.
        """
        start = max(self.events.now, self._busy) + self._gap
        self._gap = COSTS.transfer
        rows: dict[int, int] = {}
        arrivals: dict[PeCoordinate, int] = {}
        for x, y in sorted(places):
            arrivals[x, y] = rows.get(y, start) + self.fabric.hop * x
            rows[y] = rows.get(y, start) + words
        self._busy = max(rows.values(), default=start)
        return arrivals

    def issue(self, command: HostCommand) -> HostCommand:
        """Send a command to its PEs."""
        for place, time in self._schedule_transfer(command.left, command.cycles).items():
            self.streams[place].add(command, time + command.cycles)
        return command

    def launch(self, name: str, *args: Any) -> HostCommand:
        """Call an exported function on every PE that has it."""
        places = [place for place, pe in self.pes.items() if name in pe.program.exports]
        command = LaunchCommand(name, places, args)
        self.launches.append(command)
        return self.issue(command)

    def copy_in(self, name: str, rows: dict[PeCoordinate, np.ndarray]) -> HostCommand:
        """Write each PE's row to the memory at a symbol."""
        self._last_in = CopyInCommand(name, rows)
        return self.issue(self._last_in)

    def copy_out(self, name: str, rows: dict[PeCoordinate, np.ndarray]) -> HostCommand:
        """Read the memory at a symbol into each PE's row."""
        return self.issue(CopyOutCommand(name, rows))

    def stream_in(self, color: int, rows: dict[PeCoordinate, np.ndarray]) -> HostCommand:
        """Send words to PEs on a color."""
        command = HostCommand(f"color {color}", rows)

        def start() -> None:
            words = max((row.size for row in rows.values()), default=0)
            for place, time in self._schedule_transfer(rows, words).items():
                self._get_source(place, color).send(rows[place], time, partial(command.left.discard, place))
            self._gap = COSTS.stream

        # The host's words arrive in order: a stream follows earlier copies.
        if self._last_in is not None and self._last_in.left:
            self._last_in.then.append(start)
        else:
            start()
        return command

    def _get_source(self, place: PeCoordinate, color: int) -> HostSource:
        """The host's source for a color of a PE: it feeds the router if a route accepts the words, else the input
        queue.
        """
        if (place, color) not in self.sources:
            node = self.fabric.nodes[place]
            channel = node.channels.get(color)
            routed = channel is not None and channel.route.accepts(HOST) and not channel.route.reconfigurable
            self.sources[place, color] = HostSource(
                RouterEntrance(channel) if channel and routed else node.get_input(color)
            )
        return self.sources[place, color]

    def stream_out(self, color: int, rows: dict[PeCoordinate, np.ndarray]) -> HostCommand:
        """Receive words that PEs send on a color into their rows."""
        command = HostCommand(f"color {color}", rows)
        for place, row in rows.items():
            channel = self.fabric.nodes[place].channels.get(color)
            sink = channel.get_host_sink() if channel else self.fabric.nodes[place].get_output(color).collect()
            sink.receive(row, partial(command.left.discard, place))
        self._gap = COSTS.stream
        return command

    def wait(self, command: HostCommand, size: int | None = None) -> None:
        """Advance the clock until a command is complete.

        Args:
            command: the command.
            size: the number of bytes that the host waits for.

        Raises:
            CslFault: the program stalls; names the waiting tasks and wavelets.
        """
        self.events.run(limit=self.limit, awaited=command.left)
        if command.left:
            self._raise_stall(size)

    def settle(self) -> None:
        """Advance the clock until no event is left."""
        self.events.run(limit=self.limit)

    def _raise_stall(self, size: int | None) -> NoReturn:
        what = "the program stalls"
        if size is not None:
            what = f"received length (0 bytes) is not expected ({size} bytes), could be a kernel stall"
        running: list[str] = []
        state = "no event is left"
        if self.events.pending:
            state, running = f"still running after the limit of {self.limit:,} cycles,", self._describe_running()
        lines = "".join(f"\n    {line}" for line in shorten_report(running + self.describe_stall()))
        raise CslFault(f"{what}: {state} at cycle {self.cycles}{lines}")

    def _describe_running(self) -> list[str]:
        """The tasks that the PEs ran more than once among the latest ones."""
        latest = Counter((place, name) for place, name, _, _ in self.timeline[-RECENT_TASKS:])
        names: dict[PeCoordinate, list[str]] = {}
        for (place, name), count in latest.items():
            if count > 1:
                names.setdefault(place, []).append(name)
        return [f"PE {place}: runs {', '.join(tasks)} again and again" for place, tasks in names.items()]

    def describe_stall(self) -> list[str]:
        """Descriptions of the waiting tasks and wavelets."""
        unblock = [text for stream in self.streams.values() if (text := stream.explain_block())]
        waits = [f"PE {place}: {text}" for place, pe in self.pes.items() for text in describe_waits(pe)]
        return unblock + waits + self.fabric.describe_stuck()


def shorten_report(lines: list[str]) -> list[str]:
    """The first lines of a report, and the number of omitted ones."""
    return (
        lines
        if len(lines) <= MAX_REPORT_LINES
        else [*lines[:MAX_REPORT_LINES], f"… and {len(lines) - MAX_REPORT_LINES} more"]
    )


def list_region(shape: tuple[int, int], x: int, y: int, width: int, height: int) -> Iterable[PeCoordinate]:
    """The PEs of a region of interest, row by row.

    Raises:
        ArgumentError: the region is not inside the rectangle.
    """
    if min(x, y, width - 1, height - 1) < 0 or x + width > shape[0] or y + height > shape[1]:
        raise ArgumentError(
            "the region of interest is not inside the program rectangle",
            expected=f"x, y, width, height inside {shape[0]} x {shape[1]}",
            received=f"{x}, {y}, {width}, {height}",
        )
    return [(px, py) for py in range(y, y + height) for px in range(x, x + width)]
