"""`SdkLayout`, the vendor's other way to lay a program out: code regions, ports and streams, written in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, DeviceUnavailable
from tessera.interp.target.csl.commands import Place
from tessera.interp.target.csl.host.geometry import IntRectangle, IntVector


class SdkTarget(Enum):
    """The machine."""

    WSE2 = "wse2"
    WSE3 = "wse3"


class Route(Enum):
    """A direction at a router."""

    WEST = "WEST"
    EAST = "EAST"
    NORTH = "NORTH"
    SOUTH = "SOUTH"
    RAMP = "RAMP"


class Edge(Enum):
    """A side of a code region; its value is the direction that leaves the region there."""

    LEFT = "WEST"
    RIGHT = "EAST"
    TOP = "NORTH"
    BOTTOM = "SOUTH"


@dataclass(frozen=True)
class SimfabConfig:
    """Options of the vendor's simulator; without effect here."""

    dump_core: bool = False
    suppress_trace: bool = False
    num_threads: int = 5


@dataclass(frozen=True)
class SdkExecutionPlatform:
    """What a program is laid out for."""

    target: SdkTarget


def get_platform(addr: str | None, config: SimfabConfig | None = None, target: Any = SdkTarget.WSE3) -> Any:
    """The simulator, as the machine `target`.

    Raises:
        DeviceUnavailable: `addr` names a real machine.
    """
    if addr:
        raise DeviceUnavailable(f"no machine at {addr}", suggestion="leave the address out: the program is simulated")
    return SdkExecutionPlatform(target)


@dataclass(frozen=True)
class Color:
    """A color by name; `value` where its number is chosen already. Connected ports have the same number."""

    name: str
    value: int | None = None
    scope: str = ""


@dataclass(frozen=True)
class RoutingPosition:
    """One switch position: from where, and to where.

    >>> RoutingPosition().set_input([Route.RAMP]).set_output([Route.EAST]).tx
    ('EAST',)
    """

    rx: tuple[str, ...] = ()
    tx: tuple[str, ...] = ()

    def set_input(self, routes: Sequence[Route]) -> RoutingPosition:
        """The same with these inputs."""
        return RoutingPosition(tuple(r.value for r in routes), self.tx)

    def set_output(self, routes: Sequence[Route]) -> RoutingPosition:
        """The same with these outputs."""
        return RoutingPosition(self.rx, tuple(r.value for r in routes))


@dataclass(frozen=True)
class EdgeRouteInfo:
    """Positions for the PEs of one edge."""

    edge: Edge
    positions: tuple[RoutingPosition, ...]


def get_edge_routing(edge: Edge, positions: Sequence[RoutingPosition]) -> EdgeRouteInfo:
    """Positions that take the place of a region's at one of its edges."""
    return EdgeRouteInfo(edge, tuple(positions))


@dataclass(eq=False)
class Port:
    """The PEs of an edge where a color enters or leaves a region."""

    region: CodeRegion
    color: Color
    edge: Edge
    positions: tuple[RoutingPosition, ...]
    size: int
    output: bool
    stream: bool = False

    def places(self) -> list[Place]:
        """The port's PEs on the whole grid."""
        dx, dy = self.region.origin
        return [(x + dx, y + dy) for x, y in self.region.edge(self.edge)]


@dataclass(eq=False)
class CodeRegion:
    """A rectangle of PEs that run one CSL file."""

    source: str
    name: str
    width: int
    height: int
    origin: Place = (0, 0)
    params: dict[Place, dict[str, Any]] = field(default_factory=dict)
    routes: dict[Place, dict[Color, tuple[RoutingPosition, ...]]] = field(default_factory=dict)
    symbols: dict[Place, dict[str, np.ndarray]] = field(default_factory=dict)
    ports: list[Port] = field(default_factory=list)

    def place(self, x: int, y: int) -> None:
        """Put the region's upper left PE there."""
        self.origin = (x, y)

    def color(self, name: str, value: int | None = None) -> Color:
        """A color that is this region's alone."""
        return Color(name, value, self.name)

    def all(self) -> list[Place]:
        """The PEs of the region, from (0, 0)."""
        return [(x, y) for y in range(self.height) for x in range(self.width)]

    def edge(self, edge: Edge) -> list[Place]:
        """The PEs of an edge."""
        fixed = {Edge.LEFT: (0, None), Edge.RIGHT: (self.width - 1, None), Edge.TOP: (None, 0)}
        x, y = fixed.get(edge, (None, self.height - 1))
        return [p for p in self.all() if x in (None, p[0]) and y in (None, p[1])]

    def _inside(self, rectangle: IntRectangle) -> list[Place]:
        (x0, y0), (x1, y1) = rectangle
        return [(x, y) for x, y in self.all() if x0 <= x < x1 and y0 <= y < y1]

    def _set(self, places: Sequence[Place], name: str | Color, value: Any) -> None:
        if isinstance(name, Color):
            name, value = name.name, name
        for place in places:
            self.params.setdefault(place, {})[name] = value

    def set_param_all(self, name: str | Color, value: Any = None) -> None:
        """Set a param on all PEs; a color alone sets the param of its name."""
        self._set(self.all(), name, value)

    def set_param_range(self, rectangle: IntRectangle, name: str | Color, value: Any = None) -> None:
        """Set a param on the PEs of a rectangle."""
        self._set(self._inside(rectangle), name, value)

    def set_param(self, coords: IntVector, name: str | Color, value: Any = None) -> None:
        """Set a param on one PE."""
        self._set([(coords.x, coords.y)], name, value)

    def paint_all(
        self, color: Color, positions: Sequence[RoutingPosition], edges: Sequence[EdgeRouteInfo] = ()
    ) -> None:
        """Route a color on all PEs; edges may have positions of their own."""
        self._paint(self.all(), color, positions)
        for info in edges:
            self._paint(self.edge(info.edge), color, info.positions)

    def paint_range(self, rectangle: IntRectangle, color: Color, positions: Sequence[RoutingPosition]) -> None:
        """Route a color on the PEs of a rectangle."""
        self._paint(self._inside(rectangle), color, positions)

    def paint(self, coords: IntVector, color: Color, positions: Sequence[RoutingPosition]) -> None:
        """Route a color on one PE."""
        self._paint([(coords.x, coords.y)], color, positions)

    def _paint(self, places: Sequence[Place], color: Color, positions: Sequence[RoutingPosition]) -> None:
        for place in places:
            self.routes.setdefault(place, {})[color] = tuple(positions)

    def set_symbol_all(self, symbol: str, data: np.ndarray, width: int, height: int) -> None:
        """Give each PE its block of a matrix (height, width) as the first value of a variable."""
        matrix = np.asarray(data).reshape(height, width)
        rows, columns = height // self.height, width // self.width
        for x, y in self.all():
            block = matrix[y * rows : (y + 1) * rows, x * columns : (x + 1) * columns]
            self.symbols.setdefault((x, y), {})[symbol] = np.ascontiguousarray(block).reshape(-1)

    def create_input_port(
        self, color: Color, edge: Edge, positions: Sequence[RoutingPosition], size: int, prefix: str = ""
    ) -> Port:
        """A port where the color comes in: the positions say where it goes."""
        return self._port(color, edge, positions, size, False)

    def create_output_port(
        self, color: Color, edge: Edge, positions: Sequence[RoutingPosition], size: int, prefix: str = ""
    ) -> Port:
        """A port where the color leaves: the positions say where it comes from."""
        return self._port(color, edge, positions, size, True)

    def _port(self, color: Color, edge: Edge, positions: Any, size: int, output: bool) -> Port:
        for position in positions:
            if position.tx if output else position.rx:
                raise ArgumentError(
                    "a port's own direction is found by the layout",
                    expected=f"positions with {'inputs' if output else 'outputs'} only",
                )
        port = Port(self, color, edge, tuple(positions), size, output)
        self.ports.append(port)
        return port


class SdkLayout:
    """A program as code regions on a grid, with connected ports and streams to the host.

    Example: `layout = SdkLayout(get_platform("")); region = layout.create_code_region("./f.csl", "f", 2, 1)`, then
    `SdkRuntime(layout.compile("out"), platform)`.
    """

    def __init__(self, platform: SdkExecutionPlatform, **options: Any) -> None:
        self.platform = platform
        self.regions: list[CodeRegion] = []
        self.connections: list[tuple[Port, Port]] = []

    def create_code_region(self, source: str | Path, name: str, width: int, height: int) -> CodeRegion:
        """A rectangle of PEs that run a file."""
        if any(region.name == name for region in self.regions):
            raise ArgumentError(f"two code regions have the name '{name}'")
        self.regions.append(CodeRegion(str(source), name, width, height))
        return self.regions[-1]

    def connect(self, output: Port, input: Port) -> None:
        """Join an output port to an input port of the same size."""
        if not output.output or input.output or output.size != input.size:
            raise ArgumentError(
                "these ports do not fit", expected="an output port and an input port of one size",
                received=f"sizes {output.size} and {input.size}",
            )  # fmt: skip
        self.connections.append((output, input))

    def create_input_stream(self, port: Port, *options: Any) -> Port:
        """A stream from the host into an input port of one PE."""
        port.stream = True
        return port

    def create_output_stream(self, port: Port, *options: Any) -> Port:
        """A stream from an output port of one PE to the host."""
        port.stream = True
        return port

    def compile(self, out_prefix: str = "out", **options: Any) -> Any:
        """Find colors and paths, and compile; what `SdkRuntime` takes."""
        from tessera.interp.target.csl.host.paths import assemble

        return assemble(self, out_prefix)
