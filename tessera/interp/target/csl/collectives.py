"""Collective operations along a line of PEs, on two colors: the threads behind the library `<collectives_2d>`.

A line's two colors rest in teardown. An operation sets the routes it needs at each PE and lets the colors go; the last
word of a stream is a teardown command, so that a color rests again before the next operation changes its routes.
With d = distance to the root, the link from d to d - 1 uses color d mod 2 on one side of the root and the other color
on its other side: no PE sends and receives on one color.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.interp.target.csl.pe import Wait
from tessera.interp.target.csl.wavelets import Opcode, encode

END = encode([(Opcode.TEARDOWN, True)])
# Cycles in which the library sets routes and descriptors before an operation moves its first word, and those that a PE
# takes besides to pass words on: fitted to the published counts of one program (gemv-collectives on 2 x 2 and 4 x 4
# PEs, five operations); `benchmarks/csl.py` shows the others.
OVERHEAD, RELAY = 490, 215
Thread = Generator[Any, None, None]


@dataclass(frozen=True)
class Line:
    """One axis: the colors, and what back and forth are called on it."""

    colors: tuple[int, int]
    back: str
    forth: str
    vertical: bool

    def place(self, pe: Any) -> int:
        """The number of a PE on its line."""
        return pe.y if self.vertical else pe.x

    def length(self, pe: Any) -> int:
        """How many PEs the line has."""
        return pe.fabric.node.fabric.height if self.vertical else pe.fabric.node.fabric.width


class Part:
    """One PE's part in an operation: where the root and the neighbours are, and how to talk to them."""

    def __init__(self, line: Line, pe: Any, root: int) -> None:
        self.line, self.pe = line, pe
        self.me, self.last, self.root = line.place(pe), line.length(pe) - 1, root
        self.distance = abs(self.me - root)
        self.used: list[int] = []

    @property
    def ends_here(self) -> bool:
        """Whether nothing lies beyond this PE, seen from the root."""
        return self.me in (0, self.last)

    @property
    def beyond(self) -> int:
        """PEs beyond this one, seen from the root."""
        return self.me if self.me < self.root else self.last - self.me

    def sides(self) -> Iterator[tuple[bool, int]]:
        """The sides of the root on which there are PEs: whether it lies behind, and how many there are."""
        if self.root > 0:
            yield True, self.root
        if self.root < self.last:
            yield False, self.last - self.root

    def color(self, distance: int, behind: bool) -> int:
        """The color of the link between a distance and the next smaller one."""
        return self.line.colors[(distance + (not behind)) % 2]

    def inner(self) -> int:
        """The color of the link towards the root."""
        return self.color(self.distance, self.me < self.root)

    def outer(self) -> int:
        """The color of the link away from the root."""
        return self.color(self.distance + 1, self.me < self.root)

    def toward(self) -> str:
        """The direction of the root."""
        return self.line.forth if self.me < self.root else self.line.back

    def away(self) -> str:
        """The direction away from the root."""
        return self.line.back if self.me < self.root else self.line.forth

    def open(self, color: int, rx: tuple[str, ...], tx: tuple[str, ...]) -> None:
        """Set a color's route and let it go."""
        self.pe.fabric.reset_routes(color, rx, tx)
        self.pe.fabric.on_teardown(color, lambda: self.pe.notify("state", ("rest", color)))
        self.pe.fabric.teardown_exit(color)
        self.used.append(color)

    def send(self, color: int, words: np.ndarray) -> Thread:
        """Send words."""
        left: list[int] = words.tolist()
        while left and not self.pe.fabric.push(color, left):
            yield Wait("out", color)
        while not self.pe.fabric.settled(color):
            yield Wait("out", color)

    def end(self, color: int) -> Thread:
        """Send the command that puts the color to rest."""
        while not self.pe.fabric.push(color, [END], control=True):
            yield Wait("out", color)

    def receive(self, color: int, count: int, use: Callable[[int, np.ndarray], Thread | None]) -> Thread:
        """Receive `count` words; `use(start, words)` gets them as they come."""
        done = 0
        while done < count:
            words = self.pe.fabric.pop(color, count - done)
            if not words:
                self.pe.fabric.want(color, count - done)
                yield Wait("in", color)
                continue
            follow = use(done, np.array(words, np.uint32))
            done += len(words)
            if follow is not None:
                yield from follow

    def store(self, color: int, target: np.ndarray) -> Thread:
        """Receive as many words as `target` holds into it."""

        def use(start: int, words: np.ndarray) -> None:
            target[start : start + words.size] = words

        return self.receive(color, target.size, use)

    def forward(self, source: int, color: int, count: int) -> Thread:
        """Receive words on one color and send them on another."""
        return self.receive(source, count, lambda start, words: self.send(color, words))

    def rest(self) -> Thread:
        """Wait until the colors used rest."""
        for color in self.used:
            while color not in self.pe.fabric.teardown_pending():
                yield Wait("state", ("rest", color))


def broadcast(part: Part, buffer: np.ndarray) -> Thread:
    """The root's buffer to all: the fabric copies it on its way."""
    color = part.line.colors[0]
    if part.distance == 0:
        ways = tuple(part.line.back if behind else part.line.forth for behind, _ in part.sides())
        if ways:
            part.open(color, ("RAMP",), ways)
            yield from part.send(color, buffer)
            yield from part.end(color)
    else:
        part.open(color, (part.toward(),), ("RAMP",) if part.ends_here else ("RAMP", part.away()))
        yield from part.store(color, buffer)
    yield from part.rest()


def scatter(part: Part, send: np.ndarray, receive: np.ndarray) -> Thread:
    """A part of the root's buffer to each: every PE keeps the first that comes, and passes the rest on."""
    count = receive.size
    if part.distance == 0:
        receive[:] = send[part.me * count : (part.me + 1) * count]
        for behind, number in part.sides():
            color = part.color(1, behind)
            part.open(color, ("RAMP",), (part.line.back if behind else part.line.forth,))
            for far in range(1, number + 1):
                index = part.me - far if behind else part.me + far
                yield from part.send(color, send[index * count : (index + 1) * count])
            yield from part.end(color)
    else:
        part.open(part.inner(), (part.toward(),), ("RAMP",))
        if part.beyond:
            part.open(part.outer(), ("RAMP",), (part.away(),))
        yield from part.store(part.inner(), receive)
        yield from part.forward(part.inner(), part.outer(), part.beyond * count)
        if part.beyond:
            yield from part.end(part.outer())
    yield from part.rest()


def gather(part: Part, send: np.ndarray, receive: np.ndarray) -> Thread:
    """Each PE's buffer to the root: every PE sends its own first, then what comes from beyond."""
    count = send.size
    if part.distance == 0:
        receive[part.me * count : (part.me + 1) * count] = send
        for behind, number in part.sides():
            part.open(part.color(1, behind), (part.line.back if behind else part.line.forth,), ("RAMP",))
            for far in range(1, number + 1):
                index = part.me - far if behind else part.me + far
                yield from part.store(part.color(1, behind), receive[index * count : (index + 1) * count])
    else:
        part.open(part.inner(), ("RAMP",), (part.toward(),))
        if part.beyond:
            part.open(part.outer(), (part.away(),), ("RAMP",))
        yield from part.send(part.inner(), send)
        yield from part.forward(part.outer(), part.inner(), part.beyond * count)
        yield from part.end(part.inner())
    yield from part.rest()


def reduce_fadds(part: Part, send: np.ndarray, receive: np.ndarray) -> Thread:
    """The sum of all buffers to the root: from both ends, every PE adds its own to what comes and passes it on."""
    own = send.view(np.float32)
    if part.distance == 0:
        total = own.copy()

        def add(start: int, words: np.ndarray) -> None:
            total[start : start + words.size] += words.view(np.float32)

        for behind, _ in part.sides():
            part.open(part.color(1, behind), (part.line.back if behind else part.line.forth,), ("RAMP",))
        for behind, _ in part.sides():
            yield from part.receive(part.color(1, behind), own.size, add)
        receive[:] = total.view(np.uint32)
    else:
        part.open(part.inner(), ("RAMP",), (part.toward(),))
        if part.beyond:
            part.open(part.outer(), (part.away(),), ("RAMP",))

            def pass_on(start: int, words: np.ndarray) -> Thread:
                sums = own[start : start + words.size] + words.view(np.float32)
                return part.send(part.inner(), sums.view(np.uint32))

            yield from part.receive(part.outer(), own.size, pass_on)
        else:
            yield from part.send(part.inner(), send)
        yield from part.end(part.inner())
    yield from part.rest()
