"""A program on its grid of PEs: loads it, takes the host's commands, advances the clock, and explains a stall."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

import numpy as np

from tessera.errors import ArgumentError
from tessera.interp.target.csl.commands import Command, CopyIn, CopyOut, Launch, Place, Stream
from tessera.interp.target.csl.events import Events
from tessera.interp.target.csl.fabric import DEPTH, Fabric
from tessera.interp.target.csl.faults import CslFault
from tessera.interp.target.csl.host_streams import Gate, HostSource
from tessera.interp.target.csl.pe import Pe
from tessera.interp.target.csl.routes import HOST
from tessera.interp.target.csl.together import cohorts

# Cycles between two transfers of the host, fitted to what five public programs of many launches count on the vendor's
# simulator; and after a stream, which nothing acknowledges: programs that stream and then copy rely on a slow host.
LATENCY, AFTER_STREAM = 140, 1000
LIMIT = 10**9  # cycles after which a run is given up
LISTED = 12  # lines of a stall report


class Simulation:
    """One run of a compiled program.

    Args:
        layout: what `compile_program` returns.
        seed: shuffles the order of events of one cycle and the links' delays, to expose races; None: a fixed order.
        depth: words that fit into each of the fabric's queues.
        limit: the cycle at which a run that does not end is given up.
        together: PEs of one program execute together where they do the same; False: one after another. Both give the
            same numbers, cycles and order of events.

    Raises:
        CslFault: from `wait`, and from anything that advances the clock, for a fault of the program.
    """

    def __init__(
        self, layout: Any, seed: int | None = None, depth: int = DEPTH, limit: int = LIMIT, together: bool = True
    ) -> None:
        self.layout, self.limit = layout, limit
        self.events = Events(seed)
        self.fabric = Fabric(self.events, layout.width, layout.height, layout.colors, seed, depth, layout.arch)
        self.pes: dict[Place, Any] = {}
        self.streams: dict[Place, Stream] = {}
        self.launches: list[Launch] = []
        self._last_in: Command | None = None
        self._busy = 0  # until when the channel from the host is in use
        self._gap = AFTER_STREAM  # before the next transfer
        self.sources: dict[tuple[Place, int], HostSource] = {}
        self.timeline: list[tuple[Place, str, int, int]] = []
        self.cohorts = cohorts(tile.program for tile in layout.tiles.values()) if together else {}
        for place, tile in layout.tiles.items():
            self._place(place, tile.program)

    def _place(self, place: Place, program: Any) -> None:
        pe = Pe(program, *place, self.events, self.fabric.view(*place), self.cohorts.get(id(program)))
        pe.trace = lambda name, start, end: self.timeline.append((place, name, start, end))
        self.fabric.nodes[place].pe = self.pes[place] = pe
        self.streams[place] = Stream(self.events, pe, place)

    def boot(self) -> None:
        """Start every PE: tasks that were activated at compile time run."""
        for pe in self.pes.values():
            pe.boot()

    @property
    def cycles(self) -> int:
        """The cycle that the run has reached."""
        return self.events.now

    def _turns(self, places: Iterable[Place], words: int) -> dict[Place, int]:
        """When each PE's part of a transfer is there: rows at a time, in a row one PE after another from the west."""
        start = max(self.events.now, self._busy) + self._gap
        self._gap = LATENCY
        rows: dict[int, int] = {}
        turns: dict[Place, int] = {}
        for x, y in sorted(places):
            turns[x, y] = rows.get(y, start) + x
            rows[y] = rows.get(y, start) + words
        self._busy = max(rows.values(), default=start)
        return turns

    def issue(self, command: Command) -> Command:
        """Send a command to its PEs."""
        for place, time in self._turns(command.left, command.cycles).items():
            self.streams[place].add(command, time + command.cycles)
        return command

    def launch(self, name: str, *args: Any) -> Command:
        """Call an exported function on every PE that has it."""
        places = [place for place, pe in self.pes.items() if name in pe.program.exports]
        command = Launch(name, places, args)
        self.launches.append(command)
        return self.issue(command)

    def copy_in(self, name: str, rows: dict[Place, np.ndarray]) -> Command:
        """Write each PE's row to the memory at a symbol."""
        self._last_in = CopyIn(name, rows)
        return self.issue(self._last_in)

    def copy_out(self, name: str, rows: dict[Place, np.ndarray]) -> Command:
        """Read the memory at a symbol into each PE's row."""
        return self.issue(CopyOut(name, rows))

    def stream_in(self, color: int, rows: dict[Place, np.ndarray]) -> Command:
        """Send words to PEs on a color."""
        command = Command(f"color {color}", rows)

        def start() -> None:
            words = max((row.size for row in rows.values()), default=0)
            for place, time in self._turns(rows, words).items():
                self._source(place, color).send(rows[place], time, partial(command.left.discard, place))
            self._gap = AFTER_STREAM

        # The host's words travel in order: a stream comes after the copies before it.
        if self._last_in is not None and self._last_in.left:
            self._last_in.then.append(start)
        else:
            start()
        return command

    def _source(self, place: Place, color: int) -> HostSource:
        """Where the host's words for a color of a PE go in: its router where a route takes them, else its queue."""
        if (place, color) not in self.sources:
            node = self.fabric.nodes[place]
            channel = node.channels.get(color)
            routed = channel is not None and channel.route.accepts(HOST) and not channel.route.flexible
            self.sources[place, color] = HostSource(Gate(channel) if channel and routed else node.input(color))
        return self.sources[place, color]

    def stream_out(self, color: int, rows: dict[Place, np.ndarray]) -> Command:
        """Collect words that PEs send on a color into their rows."""
        command = Command(f"color {color}", rows)
        for place, row in rows.items():
            channel = self.fabric.nodes[place].channels.get(color)
            sink = channel.host() if channel else self.fabric.nodes[place].output(color).collect()
            sink.receive(row, partial(command.left.discard, place))
        self._gap = AFTER_STREAM
        return command

    def wait(self, command: Command, size: int | None = None) -> None:
        """Advance the clock until a command is over.

        Raises:
            CslFault: nothing can happen any more, and it is not over; says who waits for what. `size`: the bytes
                that the host waits for.
        """
        self.events.run(until=lambda: not command.left, limit=self.limit)
        if command.left:
            self._stall(size)

    def settle(self) -> None:
        """Advance the clock until nothing happens any more."""
        self.events.run(limit=self.limit)

    def _stall(self, size: int | None) -> NoReturn:
        what = "the program stalls"
        if size is not None:
            what = f"received length (0 bytes) is not expected ({size} bytes), could be a kernel stall"
        state = "nothing can happen any more"
        if self.events.pending:
            state = f"it still runs after {self.limit:,} cycles, the limit,"
        lines = "".join(f"\n    {line}" for line in shortened(self.reasons()))
        raise CslFault(f"{what}: {state} at cycle {self.cycles}{lines}")

    def reasons(self) -> list[str]:
        """Who waits for what, in words."""
        unblock = [text for stream in self.streams.values() if (text := stream.complaint())]
        waits = [f"PE {place}: {text}" for place, pe in self.pes.items() for text in pe.waiting()]
        return unblock + waits + self.fabric.stuck()


def shortened(lines: list[str]) -> list[str]:
    """The first lines, and how many more there are."""
    return lines if len(lines) <= LISTED else [*lines[:LISTED], f"… and {len(lines) - LISTED} more"]


def region(shape: tuple[int, int], x: int, y: int, width: int, height: int) -> Iterable[Place]:
    """The PEs of a region of interest, row by row.

    Raises:
        ArgumentError: it does not lie in the rectangle.
    """
    if min(x, y, width - 1, height - 1) < 0 or x + width > shape[0] or y + height > shape[1]:
        raise ArgumentError(
            "the region of interest is not inside the program rectangle",
            expected=f"x, y, width, height inside {shape[0]} x {shape[1]}",
            received=f"{x}, {y}, {width}, {height}",
        )
    return [(px, py) for py in range(y, y + height) for px in range(x, x + width)]
