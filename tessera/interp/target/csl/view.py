"""The fabric as one PE sees it: its queues by color, and its routes, which it may change."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tessera.interp.target.csl.faults import CslFault
from tessera.interp.target.csl.queues import InputQueue
from tessera.interp.target.csl.router import Channel, Node
from tessera.interp.target.csl.routes import Route, directions
from tessera.interp.target.csl.wavelets import CONTROL, WORD


class View:
    """The fabric from one PE: its queues by color, and its routes to change."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def peek(self, color: int) -> tuple[int, bool] | None:
        """The first word that has arrived and whether it is a control word; None where there is none."""
        words = self.node.input(color).words
        if not words or words[0][0] > self.node.fabric.events.now:
            return None
        return words[0][1] & WORD, bool(words[0][1] & CONTROL)

    def queue(self, color: int) -> InputQueue:
        """The queue in which words of a color wait."""
        return self.node.input(color)

    def pop(self, color: int, limit: int) -> list[int]:
        """Up to `limit` data words that have arrived; stops before a control word."""
        return self.node.input(color).take(self.node.fabric.events.now, limit)

    def pop_control(self, color: int) -> int | None:
        """The first word, if it is a control word that has arrived."""
        found = self.peek(color)
        if found is None or not found[1]:
            return None
        self.node.input(color).take_control(self.node.fabric.events.now)
        return found[0]

    def count(self, color: int) -> int:
        """Data words at the head that have arrived."""
        return self.node.input(color).count(self.node.fabric.events.now)

    def want(self, color: int, count: int) -> None:
        """Ask to be told only when so many words are there."""
        self.node.input(color).want(count)

    def push(self, color: int, words: Iterable[int], control: bool = False) -> int:
        """Offer words, which may have flags of the module `wavelets`; how many were taken (all or none)."""
        return self.node.output(color).offer([word | CONTROL for word in words] if control else list(words))

    def settled(self, color: int) -> bool:
        """Whether the words pushed so far have gone, but for what fits in the queue."""
        return self.node.output(color).settled()

    def input_empty(self, color: int) -> bool:
        """Whether no word of the color has arrived."""
        return self.peek(color) is None

    def input_full(self, color: int) -> bool:
        """Whether the color's input queue has no room."""
        return not self.node.input(color).room()

    def output_empty(self, color: int) -> bool:
        """Whether all words written have left."""
        return not self.node.output(color).words

    def output_full(self, color: int) -> bool:
        """Whether the color's output queue has no room."""
        queue = self.node.output(color)
        return len(queue.words) >= queue.depth

    def when_empty(self, side: str, color: int, call: Callable[[], None]) -> None:
        """Call this, once, as soon as no word waits in the color's input ("in") or output queue."""
        queue = self.node.input(color) if side == "in" else self.node.output(color)
        if queue.words:
            queue.emptied = call
        else:
            self.node.fabric.events.at(self.node.fabric.events.now, call)

    def _channel(self, color: int) -> Channel:
        if color not in self.node.channels:
            raise CslFault(f"{self.node.name} has no route for color {color} that could be changed")
        return self.node.channels[color]

    def route(self, color: int) -> Route:
        """The route of a color, to look at."""
        return self._channel(color).route

    def changed(self, color: int) -> Route:
        """The route of a color, about to be changed."""
        channel = self.node.channels.get(color) or self.node.routed(color)
        channel.route.flexible = True
        channel.wake(self.node.fabric.events.now)
        return channel.route

    def reset_routes(self, color: int, rx: tuple[str, ...], tx: tuple[str, ...]) -> None:
        """Replace position 0."""
        route = self.changed(color)
        route.rx, route.tx = directions(rx), directions(tx)
        route.refresh()

    def set_side(self, color: int, way: str, side: str, wanted: bool | None) -> None:
        """Put a direction into position 0 ("rx" or "tx") or take it out; None: what it is not now."""
        route, (direction,) = self.changed(color), directions(side)
        given = getattr(route, way)
        there = direction in given
        if there != (not there if wanted is None else wanted):
            setattr(route, way, tuple(d for d in given if d != direction) if there else (*given, direction))
            route.refresh()

    def invalidate_positions(self, color: int) -> None:
        """Leave position 0 only."""
        route = self.changed(color)
        route.switches = [None, None, None]
        route.refresh()

    def set_switch(self, color: int, position: int, rx: str | None = None, tx: str | None = None) -> None:
        """What position 1, 2 or 3 changes in the one before it."""
        route = self.changed(color)
        route.switches[position - 1] = (directions(rx or ()), directions(tx or ()))
        route.refresh()

    def set_position(self, color: int, position: int) -> None:
        """Take a switch position."""
        self.changed(color).move(position)

    def set_pop_mode(self, color: int, mode: str) -> None:
        """Set "no_pop", "always_pop" or "pop_on_advance"."""
        self.changed(color).pop = mode

    def set_ring(self, color: int, on: bool) -> None:
        """Whether position 0 follows the last one."""
        self.changed(color).ring = on

    def set_filter(
        self, color: int, counter: int | None = None, limit: int | None = None, max_counter: int | None = None
    ) -> None:
        """Change settings of the color's counter filter."""
        found = self._channel(color).route.filter
        if found is None:
            raise CslFault(f"{self.node.name} has no filter on color {color}")
        found.counter = found.counter if counter is None else counter
        found.limit = found.limit if limit is None else limit
        found.top = found.top if max_counter is None else max_counter

    def teardown_pending(self) -> set[int]:
        """The colors in teardown."""
        return {color for color, channel in self.node.channels.items() if channel.route.tearing}

    def on_teardown(self, color: int, call: Callable[[], None]) -> None:
        """Call this, and not the program's handler, when the color is torn down."""
        self.node.handlers[color] = call

    def teardown_exit(self, color: int) -> None:
        """Let a color's wavelets flow again."""
        self.changed(color).tearing = False
