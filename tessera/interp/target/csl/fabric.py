"""The grid of routers, and the view of it that each PE has."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NoReturn

from tessera.interp.target.csl import values
from tessera.interp.target.csl.faults import CslFault
from tessera.interp.target.csl.router import Channel, Node
from tessera.interp.target.csl.routes import NAMES, STEP, Filter, Route, directions
from tessera.interp.target.csl.values import ColorConfig
from tessera.interp.target.csl.view import View

DEPTH = 8  # words in a buffer of a router: the vendor documents none
# Words in the queues of a PE, by number, as documented; a color without a queue has those of the fabric's depth.
DEPTHS = {
    ("wse2", "in"): (6, 6, 4, 4, 2, 2, 2, 2),
    ("wse2", "out"): (2, 2, 6, 6, 2, 2),
    ("wse3", "in"): (8, 8, 4, 4, 4, 4, 4, 4),
    ("wse3", "out"): (8,) * 8,
}


class Fabric:
    """All routers of a program rectangle.

    Args:
        events: the event loop, whose `now` is the cycle.
        width, height: PEs of the rectangle.
        colors: for each PE its colors' configurations, as the layout gives them.
        seed: shuffles link delays (1 to 3 cycles a hop) to expose races; None: 1 cycle.
        depth: words that fit into each buffer and queue.

    Raises:
        CslFault: while it runs, where a wavelet meets no route, leaves the rectangle or comes from a side that the
            route does not take.
    """

    def __init__(
        self,
        events: Any,
        width: int,
        height: int,
        colors: dict[tuple[int, int], dict[int, ColorConfig]],
        seed: int | None = None,
        depth: int = DEPTH,
        arch: str = "",
    ) -> None:
        self.arch = arch
        self.events, self.width, self.height, self.depth = events, width, height, depth
        self.nodes = {(x, y): Node(self, x, y) for y in range(height) for x in range(width)}
        for place, configs in colors.items():
            node = self.nodes[place]
            for color, config in configs.items():
                node.channels[color] = Channel(node, color, route_of(config), config)
        self.shared: dict[str, Any] = {}  # what a library keeps for all PEs together
        self.steady = seed is None  # each hop takes one cycle
        dice = random.Random(seed)
        self.delay: Callable[[], int] = (lambda: 1) if seed is None else (lambda: dice.randint(1, 3))

    def queue_depth(self, node: Node, way: str, color: int) -> int:
        """Words in a PE's queue ("in" or "out") of a color."""
        queues: dict[int, int] = getattr(node.pe, f"{way}_colors", {})
        numbers = DEPTHS.get((self.arch, way), ())
        return next((numbers[q] for q, c in queues.items() if c == color and q < len(numbers)), self.depth)

    def view(self, x: int, y: int) -> View:
        """The fabric as the PE at (x, y) sees it."""
        return View(self.nodes[x, y])

    def neighbour(self, channel: Channel, direction: int) -> Channel:
        """The channel of the same color one hop away."""
        node = channel.node
        dx, dy = STEP[direction]
        there = self.nodes.get((node.x + dx, node.y + dy))
        if there is None:
            self.fault(f"color {channel.color} leaves the rectangle {NAMES[direction]} of {node.name}", channel)
        # A swap exchanges the two colors of a pair (0 and 1, 2 and 3, …) on the way.
        swap = channel.config.swap_x if dx else channel.config.swap_y
        color = channel.color ^ 1 if swap else channel.color
        if color not in there.channels:
            self.fault(
                f"a wavelet of color {color} comes from {node.name} into {there.name}, "
                "which has no route for that color",
                channel,
            )
        return there.channels[color]

    def fault(self, message: str, channel: Channel) -> NoReturn:
        """Raise a run-time fault at a route, in the present cycle."""
        raise CslFault(
            f"{message} (cycle {self.events.now})",
            location=channel.config.loc,
            suggestion=f"look at the routes of color {channel.color} around {channel.node.name}",
        )

    def stuck(self) -> list[str]:
        """Every wavelet that waits somewhere, in words."""
        found = []
        for node in self.nodes.values():
            texts = [text for channel in node.channels.values() for text in channel.stuck()]
            texts += [
                f"{len(q.words)} wavelet(s) of color {q.color} wait in the input queue, which nothing reads"
                for q in node.inputs.values()
                if q.words
            ]
            texts += [
                f"{len(q.words)} wavelet(s) of color {q.color} wait in the output queue"
                + ("" if q.channel else ": the color has no route here, and the host does not read it")
                for q in node.outputs.values()
                if q.words
            ]
            found += [f"{node.name}: {text}" for text in texts]
        return found


def route_of(config: ColorConfig) -> Route:
    """The live route of a color's configuration."""
    switches = [
        None if change.invalid else (directions(change.rx or ()), directions(change.tx or ()))
        for change in config.switches
    ]
    return Route(
        rx=directions(config.rx),
        tx=directions(config.tx),
        switches=switches,
        current=config.current,
        ring=config.ring,
        pop=config.pop_mode,
        filter=None if config.filter is None else filter_of(config.filter),
        tearing=config.teardown,
    )


def filter_of(config: values.Filter) -> Filter:
    """A fresh filter with a layout's settings."""
    limits = config.limits
    return Filter(
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
