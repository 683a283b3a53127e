"""Router grid: the routers of a program rectangle, and each PE's view of the fabric."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, NoReturn

from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.fabric.edge_channel import EdgeChannel
from tessera.interp.target.csl.fabric.queues import InputQueue
from tessera.interp.target.csl.fabric.router import RouterChannel, RouterNode
from tessera.interp.target.csl.fabric.routing import (
    CONTROL_FLAG,
    DIRECTION_NAMES,
    DIRECTION_STEPS,
    WORD_MASK,
    ColorRoute,
    WaveletFilter,
    direction_numbers,
)
from tessera.interp.target.csl.sema import values
from tessera.interp.target.csl.sema.values import ColorConfig
from tessera.interp.target.csl.text.diagnostics import CslFault

# A PE's view of the fabric.


class FabricView:
    """The fabric as one PE sees it: its queues by color, and its routes, which it may change."""

    def __init__(self, node: RouterNode) -> None:
        self.node, self.events = node, node.fabric.events

    def peek(self, color: int) -> tuple[int, bool] | None:
        """The first arrived word and whether it is a control word, or None."""
        word = self.node.get_input(color).peek(self.events.now)
        return None if word is None else (word & WORD_MASK, bool(word & CONTROL_FLAG))

    def get_queue(self, color: int) -> InputQueue:
        """The input queue of a color."""
        return self.node.get_input(color)

    def pop(self, color: int, limit: int) -> list[int]:
        """Remove and return up to `limit` arrived data words before the first control word."""
        return self.node.get_input(color).take(self.events.now, limit)

    def pop_control(self, color: int) -> int | None:
        """Remove and return the first word if it is an arrived control word."""
        head = self.peek(color)
        if head is None or not head[1]:
            return None
        self.node.get_input(color).take_control(self.node.fabric.events.now)
        return head[0]

    def count(self, color: int) -> int:
        """The number of arrived data words before the first control word."""
        return self.node.get_input(color).count(self.events.now)

    def want(self, color: int, count: int) -> None:
        """Request a notification only at that many words."""
        self.node.get_input(color).want(count)

    def await_stream(self, color: int, count: int) -> None:
        """Request a notification at that many words, for a reader that removes each word as it arrives."""
        self.node.get_input(color).await_stream(count, self.node.fabric.streams)

    def push(self, color: int, words: Iterable[int], control: bool = False) -> int:
        """Offer words, possibly with the flags of `fabric.routing`; returns how many were accepted (all or none)."""
        if control:
            words = [word | CONTROL_FLAG for word in words]
        return self.node.get_output(color).offer(words if type(words) is list else list(words))

    def use_queue(self, color: int, number: int) -> None:
        """Send a color through an output queue that the program names in a descriptor alone, as WSE-2 permits."""
        depths = QUEUE_DEPTHS.get((self.node.fabric.arch, "out"), ())
        queue = self.node.get_output(color)
        if 0 <= number < len(depths) and queue.depth != depths[number]:
            queue.set_depth(depths[number])

    def is_settled(self, color: int) -> bool:
        """Whether the words pushed so far have left, except for those that fit in the queue."""
        return self.node.get_output(color).is_settled()

    def find_written(self, color: int) -> int:
        """The cycle in which the last of the words pushed so far found room in the queue."""
        node = self.node
        if node.ahead is not None:
            node.ahead.retract()
        return node.ramp - node.get_output(color).depth

    def input_empty(self, color: int) -> bool:
        """Whether the input queue of the color has no arrived word."""
        return self.peek(color) is None

    def input_full(self, color: int) -> bool:
        """Whether the input queue of the color has no room."""
        return not self.node.get_input(color).words.has_room()

    def output_empty(self, color: int) -> bool:
        """Whether all written words have left."""
        return not self.node.get_output(color).words

    def output_full(self, color: int) -> bool:
        """Whether the output queue of the color has no room."""
        queue = self.node.get_output(color)
        return queue.is_full()

    def when_empty(self, side: str, color: int, call: Callable[[], None]) -> None:
        """Call `call` once when the color's input ("in") or output queue is empty."""
        queue = self.node.get_input(color) if side == "in" else self.node.get_output(color)
        if queue.words:
            queue.emptied = call
        else:
            self.node.fabric.events.at(self.node.fabric.events.now, call)

    def _channel(self, color: int) -> RouterChannel:
        if color not in self.node.channels:
            raise CslFault(f"{self.node.name} has no route for color {color} to change")
        return self.node.channels[color]

    def get_route(self, color: int) -> ColorRoute:
        """The route of a color, to read; a color without one has no direction."""
        channel = self.node.channels.get(color)
        return ColorRoute((), ()) if channel is None else channel.route

    def change_route(self, color: int) -> ColorRoute:
        """The route of a color, to change."""
        channel = self._find_channel(color)
        channel.make_reconfigurable()
        channel.wake(self.node.fabric.events.now)
        return channel.route

    def _find_channel(self, color: int) -> RouterChannel:
        """The channel of a color, which may have had no route so far."""
        return self.node.channels.get(color) or self.node.get_routed_channel(color)

    def reset_routes(self, color: int, rx: tuple[str, ...], tx: tuple[str, ...]) -> None:
        """Replace switch position 0."""
        route = self.change_route(color)
        route.rx, route.tx = direction_numbers(rx), direction_numbers(tx)
        route.refresh()

    def set_side(self, color: int, way: str, side: str, wanted: bool | None) -> None:
        """Add a direction to position 0 ("rx" or "tx"), or remove it; None toggles it."""
        route, (direction,) = self.change_route(color), direction_numbers(side)
        directions = getattr(route, way)
        present = direction in directions
        if present != (not present if wanted is None else wanted):
            setattr(route, way, tuple(d for d in directions if d != direction) if present else (*directions, direction))
            route.refresh()

    def invalidate_positions(self, color: int) -> None:
        """Remove all switch positions except 0."""
        route = self.change_route(color)
        route.switches = [None, None, None]
        route.refresh()

    def set_switch(self, color: int, position: int, rx: str | None = None, tx: str | None = None) -> None:
        """Set the changes of switch position 1, 2 or 3."""
        route = self.change_route(color)
        route.switches[position - 1] = (direction_numbers(rx or ()), direction_numbers(tx or ()))
        route.refresh()

    def set_position(self, color: int, position: int) -> None:
        """Select a switch position."""
        self.change_route(color).move(position)

    def set_pop_mode(self, color: int, mode: str) -> None:
        """Set the pop mode: "no_pop", "always_pop" or "pop_on_advance"."""
        self.change_route(color).pop = mode

    def set_ring(self, color: int, on: bool) -> None:
        """Set ring mode: whether position 0 follows the last position."""
        self.change_route(color).ring = on

    def set_filter(
        self, color: int, counter: int | None = None, limit: int | None = None, max_counter: int | None = None
    ) -> None:
        """Change settings of the color's counter filter."""
        wavelet_filter = self._channel(color).route.filter
        if wavelet_filter is None:
            raise CslFault(f"{self.node.name} has no filter on color {color}")
        wavelet_filter.counter = wavelet_filter.counter if counter is None else counter
        wavelet_filter.limit = wavelet_filter.limit if limit is None else limit
        wavelet_filter.top = wavelet_filter.top if max_counter is None else max_counter

    def teardown_pending(self) -> set[int]:
        """The colors in teardown."""
        return {color for color, channel in self.node.channels.items() if channel.route.in_teardown}

    def teardown_exit(self, color: int) -> None:
        """End the teardown of a color: its wavelets flow again."""
        self.change_route(color).in_teardown = False


# The grid of routers.


BUFFER_DEPTH = 8  # words in a router buffer of WSE-3 (not documented)
BUFFER_DEPTH_WSE2 = 2  # slides of vectors in both directions (docs/csl-cycles.md)
QUEUE_DEPTH = 8  # words in a queue whose number the program does not name
# Words in the queues of a PE, by queue number, as documented; a color without a queue has the fabric's depth.
QUEUE_DEPTHS = {
    ("wse2", "in"): (6, 6, 4, 4, 2, 2, 2, 2),
    ("wse2", "out"): (2, 2, 6, 6, 2, 2),
    ("wse3", "in"): (8, 8, 4, 4, 4, 4, 4, 4),
    ("wse3", "out"): (8,) * 8,
}
_NO_QUEUES: dict[int, int] = {}
_COLORS_OF = {"in": "in_colors", "out": "out_colors"}  # a PE's colors of queues, by the direction of these


# Told of each burst of wavelets on a link: column, row, direction, first and last cycle, wavelets.
TrafficLog = Callable[[int, int, int, int, int, int], None]
# The log of the fabrics that are made in this context.
TRAFFIC_LOG: ContextVar[TrafficLog | None] = ContextVar("CSL traffic log", default=None)


class Fabric:
    """All routers of a program rectangle.

    Args:
        events: the event queue, whose `now` is the cycle.
        width, height: PEs of the rectangle.
        colors: the color configurations of each PE from the layout.
        seed: randomises link delays (up to 2 cycles more per hop) to expose races; None: those of the cost model.
        depth: capacity of each buffer in words; None: that of the machine.
        arch: "wse2" or "wse3".

    Raises:
        CslFault: at run time, when a wavelet has no route, or arrives from a direction that the route does not accept.
    """

    def __init__(
        self,
        events: Any,
        width: int,
        height: int,
        colors: dict[tuple[int, int], dict[int, ColorConfig]],
        seed: int | None = None,
        depth: int | None = None,
        arch: str = "",
    ) -> None:
        if depth is None:
            depth = BUFFER_DEPTH_WSE2 if arch == "wse2" else BUFFER_DEPTH
        self.arch, self.log = arch, TRAFFIC_LOG.get()
        self.injection = COSTS.injection[arch == "wse3"]  # cycles of a word between its operation and the router
        self.events, self.width, self.height, self.depth = events, width, height, depth
        self.steady = seed is None  # each hop takes equally many cycles
        self.hop = COSTS.hop[arch == "wse3"]
        self.nodes = {(x, y): RouterNode(self, x, y) for y in range(height) for x in range(width)}
        for place, configs in colors.items():
            node = self.nodes[place]
            for color, config in configs.items():
                node.channels[color] = RouterChannel(node, color, make_route(config), config)
        self.shared: dict[str, Any] = {}  # library state that all PEs share
        self.streams = self.steady  # whether an operation that reads a stream into memory runs once, at its last word
        dice = random.Random(seed)
        self.delay: Callable[[], int] = (
            (lambda: self.hop) if seed is None else (lambda: dice.randint(self.hop, self.hop + 2))
        )

    def queue_depth(self, node: RouterNode, way: str, color: int) -> int:
        """The capacity of a PE's input ("in") or output queue of a color in words."""
        owners = getattr(node.pe, _COLORS_OF[way], _NO_QUEUES)
        if color in owners.values():
            numbers = QUEUE_DEPTHS.get((self.arch, way), ())
            for number, owner in owners.items():
                if owner == color and number < len(numbers):
                    return numbers[number]
        return QUEUE_DEPTH

    def view(self, x: int, y: int) -> FabricView:
        """The view of the PE at (x, y)."""
        return FabricView(self.nodes[x, y])

    def find_neighbour(self, channel: RouterChannel, direction: int) -> RouterChannel | EdgeChannel:
        """The channel of the same color one hop away, or the edge of the rectangle."""
        node = channel.node
        dx, dy = DIRECTION_STEPS[direction]
        neighbour = self.nodes.get((node.x + dx, node.y + dy))
        if neighbour is None:
            return EdgeChannel(channel)
        # A swap exchanges the two colors of a pair (0 and 1, 2 and 3, …) on the way.
        swap = channel.config.swap_x if dx else channel.config.swap_y
        color = channel.color ^ 1 if swap else channel.color
        if color not in neighbour.channels:
            self.raise_fault(
                f"a wavelet of color {color} comes from {node.name} into {neighbour.name}, "
                "which has no route for that color",
                channel,
            )
        return neighbour.channels[color]

    def raise_fault(self, message: str, channel: RouterChannel) -> NoReturn:
        """Raise a run-time fault at a route in the present cycle."""
        raise CslFault(
            f"{message} (cycle {self.events.now})",
            location=channel.config.loc,
            suggestion=f"check the routes of color {channel.color} around {channel.node.name}",
        )

    def describe_stuck(self) -> list[str]:
        """Descriptions of all waiting wavelets, and of those that left the rectangle without a stream to the host."""
        lines = [
            f"{node.name}: {len(channel.sink.words)} wavelet(s) of color {color} left the rectangle and are lost"
            for node in self.nodes.values()
            for color, channel in node.channels.items()
            if channel.sink is not None and channel.sink.words
        ]
        for node in self.nodes.values():
            if node.ahead is not None:
                node.ahead.retract()
            texts = [text for channel in node.channels.values() for text in describe_waiting_words(channel)]
            texts += [
                f"{len(q.words)} wavelet(s) of color {q.color} wait in the input queue, which nothing reads"
                for q in node.inputs.values()
                if q.words and not q.whole
            ]
            texts += [
                f"{len(q.words)} wavelet(s) of color {q.color} wait in the output queue"
                + ("" if q.channel else ": the color has no route here, and the host does not read it")
                for q in node.outputs.values()
                if q.words
            ]
            lines += [f"{node.name}: {text}" for text in texts]
        return lines


def make_route(config: ColorConfig) -> ColorRoute:
    """The run-time route of a color configuration."""
    switches = [
        None if change.invalid else (direction_numbers(change.rx or ()), direction_numbers(change.tx or ()))
        for change in config.switches
    ]
    return ColorRoute(
        rx=direction_numbers(config.rx),
        tx=direction_numbers(config.tx),
        switches=switches,
        current=config.current,
        ring=config.ring,
        pop=config.pop_mode,
        filter=None if config.filter is None else make_filter(config.filter),
        in_teardown=config.teardown,
    )


def make_filter(config: values.FilterConfig) -> WaveletFilter:
    """A filter with the settings of the layout."""
    limits = config.limits
    return WaveletFilter(
        config.kind,
        low=limits.get("min_idx", 0),
        high=limits.get("max_idx", 0),
        counter=config.init_counter,
        limit=limits.get("limit1", 0),
        top=limits.get("max_counter", 0),
        count_data=bool(limits.get("count_data")),
        count_control=bool(limits.get("count_control")),
        control_at_top=bool(limits.get("filter_control")),
        later=tuple(limits[name] for name in ("limit2", "limit3") if name in limits),
    )


def describe_waiting_words(channel: RouterChannel) -> list[str]:
    """Descriptions of the words that wait in a router, and why."""
    return [
        f"{buffer.count} wavelet(s) of color {channel.color} from {DIRECTION_NAMES[direction]}: "
        f"{_describe_reason(channel.route, direction)}"
        for direction, buffer in enumerate(channel.inputs)
        if buffer.count
    ]


def _describe_reason(route: ColorRoute, direction: int) -> str:
    rx, tx = route.here
    if route.in_teardown:
        return "the color is in teardown"
    if direction not in rx:
        return f"switch position {route.current} takes from {', '.join(DIRECTION_NAMES[d] for d in rx)} only"
    return f"no room {' or '.join(DIRECTION_NAMES[d] for d in tx)}"
