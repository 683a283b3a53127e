"""SdkLayout: code regions, ports and streams in Python (the vendor's other layout API), and their placement and
routing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import ArgumentError, DeviceUnavailable, ResourceError
from tessera.interp.target.csl.compiler import CompiledLayout, compile_program
from tessera.interp.target.csl.fabric.routing import DIRECTION_NAMES, DIRECTION_STEPS, OPPOSITE
from tessera.interp.target.csl.host.cslc import default_language
from tessera.interp.target.csl.sema.values import ColorConfig, SwitchPosition
from tessera.interp.target.csl.simulation import PeCoordinate

# Coordinates and rectangles on the fabric.


class IntVector(NamedTuple):
    """Coordinates: column and row."""

    x: int
    y: int


class IntRectangle(NamedTuple):
    """A rectangle of coordinates, without its lower right corner.

    >>> IntRectangle(IntVector(0, 0), IntVector(3, 2)).size
    (3, 2)
    """

    upper_left: IntVector
    lower_right: IntVector

    @property
    def size(self) -> tuple[int, int]:
        """The number of columns and rows."""
        return self.lower_right.x - self.upper_left.x, self.lower_right.y - self.upper_left.y


# Code regions, ports and streams.


class SdkTarget(Enum):
    """The architecture."""

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
    """A side of a code region; its value is the direction out of the region."""

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
    """The platform of a layout."""

    target: SdkTarget


def get_platform(addr: str | None, config: SimfabConfig | None = None, target: Any = SdkTarget.WSE3) -> Any:
    """The simulator with the architecture `target`.

    Raises:
        DeviceUnavailable: `addr` names a real machine.
    """
    if addr:
        raise DeviceUnavailable(
            f"no machine at {addr}", suggestion="omit the address: the program runs in the simulator"
        )
    return SdkExecutionPlatform(target)


@dataclass(frozen=True)
class Color:
    """A color by name; `value` is its number if the program chooses it. Connected ports have the same number."""

    name: str
    value: int | None = None
    scope: str = ""


@dataclass(frozen=True)
class RoutingPosition:
    """One switch position: its input and output directions.

    >>> RoutingPosition().set_input([Route.RAMP]).set_output([Route.EAST]).tx
    ('EAST',)
    """

    rx: tuple[str, ...] = ()
    tx: tuple[str, ...] = ()

    def set_input(self, routes: Sequence[Route]) -> RoutingPosition:
        """The position with these inputs."""
        return RoutingPosition(tuple(r.value for r in routes), self.tx)

    def set_output(self, routes: Sequence[Route]) -> RoutingPosition:
        """The position with these outputs."""
        return RoutingPosition(self.rx, tuple(r.value for r in routes))


@dataclass(frozen=True)
class EdgeRouteInfo:
    """Positions for the PEs of one edge."""

    edge: Edge
    positions: tuple[RoutingPosition, ...]


def get_edge_routing(edge: Edge, positions: Sequence[RoutingPosition]) -> EdgeRouteInfo:
    """Positions that replace those of a region at one of its edges."""
    return EdgeRouteInfo(edge, tuple(positions))


@dataclass(eq=False)
class Port:
    """The PEs of an edge through which a color enters or leaves a region."""

    region: CodeRegion
    color: Color
    edge: Edge
    positions: tuple[RoutingPosition, ...]
    size: int
    output: bool
    stream: bool = False

    def places(self) -> list[PeCoordinate]:
        """The port's PEs in grid coordinates."""
        dx, dy = self.region.origin
        return [(x + dx, y + dy) for x, y in self.region.edge(self.edge)]


@dataclass(eq=False)
class CodeRegion:
    """A rectangle of PEs that run one CSL file."""

    source: str
    name: str
    width: int
    height: int
    origin: PeCoordinate = (0, 0)
    params: dict[PeCoordinate, dict[str, Any]] = field(default_factory=dict)
    routes: dict[PeCoordinate, dict[Color, tuple[RoutingPosition, ...]]] = field(default_factory=dict)
    symbols: dict[PeCoordinate, dict[str, np.ndarray]] = field(default_factory=dict)
    ports: list[Port] = field(default_factory=list)

    def place(self, x: int, y: int) -> None:
        """Place the region's upper left PE."""
        self.origin = (x, y)

    def color(self, name: str, value: int | None = None) -> Color:
        """A color that belongs to this region."""
        return Color(name, value, self.name)

    def all(self) -> list[PeCoordinate]:
        """The PEs of the region, from (0, 0)."""
        return [(x, y) for y in range(self.height) for x in range(self.width)]

    def edge(self, edge: Edge) -> list[PeCoordinate]:
        """The PEs of an edge."""
        fixed = {Edge.LEFT: (0, None), Edge.RIGHT: (self.width - 1, None), Edge.TOP: (None, 0)}
        x, y = fixed.get(edge, (None, self.height - 1))
        return [p for p in self.all() if x in (None, p[0]) and y in (None, p[1])]

    def _inside(self, rectangle: IntRectangle) -> list[PeCoordinate]:
        (x0, y0), (x1, y1) = rectangle
        return [(x, y) for x, y in self.all() if x0 <= x < x1 and y0 <= y < y1]

    def _set(self, places: Sequence[PeCoordinate], name: str | Color, value: Any) -> None:
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
        """Route a color on all PEs; edges may have other positions."""
        self._paint(self.all(), color, positions)
        for info in edges:
            self._paint(self.edge(info.edge), color, info.positions)

    def paint_range(self, rectangle: IntRectangle, color: Color, positions: Sequence[RoutingPosition]) -> None:
        """Route a color on the PEs of a rectangle."""
        self._paint(self._inside(rectangle), color, positions)

    def paint(self, coords: IntVector, color: Color, positions: Sequence[RoutingPosition]) -> None:
        """Route a color on one PE."""
        self._paint([(coords.x, coords.y)], color, positions)

    def _paint(self, places: Sequence[PeCoordinate], color: Color, positions: Sequence[RoutingPosition]) -> None:
        for place in places:
            self.routes.setdefault(place, {})[color] = tuple(positions)

    def set_symbol_all(self, symbol: str, data: np.ndarray, width: int, height: int) -> None:
        """Initialise a variable of each PE with its block of a matrix (height, width)."""
        matrix = np.asarray(data).reshape(height, width)
        rows, columns = height // self.height, width // self.width
        for x, y in self.all():
            block = matrix[y * rows : (y + 1) * rows, x * columns : (x + 1) * columns]
            self.symbols.setdefault((x, y), {})[symbol] = np.ascontiguousarray(block).reshape(-1)

    def create_input_port(
        self, color: Color, edge: Edge, positions: Sequence[RoutingPosition], size: int, prefix: str = ""
    ) -> Port:
        """A port through which the color enters; the positions state its outputs."""
        return self._port(color, edge, positions, size, False)

    def create_output_port(
        self, color: Color, edge: Edge, positions: Sequence[RoutingPosition], size: int, prefix: str = ""
    ) -> Port:
        """A port through which the color leaves; the positions state its inputs."""
        return self._port(color, edge, positions, size, True)

    def _port(self, color: Color, edge: Edge, positions: Any, size: int, output: bool) -> Port:
        for position in positions:
            if position.tx if output else position.rx:
                raise ArgumentError(
                    "the layout determines a port's own direction",
                    expected=f"positions with {'inputs' if output else 'outputs'} only",
                )
        port = Port(self, color, edge, tuple(positions), size, output)
        self.ports.append(port)
        return port


class SdkLayout:
    """A program of code regions on a grid, with connected ports and streams to the host.

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
        """Connect an output port to an input port of the same size."""
        if not output.output or input.output or output.size != input.size:
            raise ArgumentError(
                "these ports cannot be connected", expected="an output port and an input port of equal size",
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
        """Assign colors and paths, and compile; the result is the `bindir` of `SdkRuntime`."""

        return compile_sdk_layout(self, out_prefix)


# Placement and routing: numbers for colors, paths between ports, one route for each color at each PE.


COLOR_COUNT = 24
RoutingPositions = tuple[RoutingPosition, ...]


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled `SdkLayout`: the program, and the ports of its streams."""

    folder: str
    layout: CompiledLayout
    streams: dict[int, tuple[PeCoordinate, int]]
    symbols: dict[PeCoordinate, dict[str, Any]]


def number_colors(layout: SdkLayout) -> dict[Color, int]:
    """Assign numbers to colors; colors of connected ports share one.

    Raises:
        ResourceError: there are more colors than the machine has.
    """
    parent: dict[Color, Color] = {}

    def root(color: Color) -> Color:
        parent.setdefault(color, color)
        while parent[color] != color:
            color = parent[color]
        return color

    for output, input in layout.connections:
        parent[root(output.color)] = root(input.color)
    for region in layout.regions:
        values = [v for row in region.params.values() for v in row.values() if isinstance(v, Color)]
        painted = [color for row in region.routes.values() for color in row]
        for color in [*values, *painted, *(port.color for port in region.ports)]:
            root(color)
    fixed = {root(color): color.value for color in parent if color.value is not None}
    free = iter(sorted(set(range(COLOR_COUNT)) - set(fixed.values())))
    numbers: dict[Color, int] = {}
    for color in parent:
        top = root(color)
        if top not in numbers:
            number = fixed[top] if top in fixed else next(free, None)
            if number is None:
                raise ResourceError(f"the layout needs more than {COLOR_COUNT} colors")
            numbers[top] = number
        numbers[color] = numbers[top]
    return numbers


class RouteGrid:
    """The routes found so far: the positions of each color at each PE."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.routes: dict[PeCoordinate, dict[int, RoutingPositions]] = {}

    def set(self, place: PeCoordinate, color: int, positions: RoutingPositions) -> None:
        """Route a color at a PE."""
        self.routes.setdefault(place, {})[color] = positions

    def path(self, start: PeCoordinate, end: PeCoordinate, color: int, first: str, port: str) -> list[int]:
        """The directions of a shortest path from `start` to `end` over PEs that do not route the color.

        Raises:
            ResourceError: there is no such path.
        """
        order = sorted(range(4), key=lambda d: DIRECTION_NAMES[d] != first)
        came: dict[PeCoordinate, tuple[PeCoordinate, int]] = {start: (start, -1)}
        queue = deque([start])
        while queue and end not in came:
            current = queue.popleft()
            for direction in order:
                neighbour = (current[0] + DIRECTION_STEPS[direction][0], current[1] + DIRECTION_STEPS[direction][1])
                inside = 0 <= neighbour[0] < self.width and 0 <= neighbour[1] < self.height
                if (
                    inside
                    and neighbour not in came
                    and (neighbour == end or color not in self.routes.get(neighbour, {}))
                ):
                    came[neighbour] = (current, direction)
                    queue.append(neighbour)
        if end not in came:
            raise ResourceError(f"no free path for port {port} from PE {start} to PE {end}")
        found = []
        while end != start:
            end, direction = came[end]
            found.append(direction)
        return found[::-1]

    def connect(self, output: Port, input: Port, color: int) -> None:
        """Route every pair of PEs of two connected ports."""
        for start, end in zip(output.places(), input.places(), strict=True):
            directions = self.path(start, end, color, output.edge.value, output.color.name)
            leave = DIRECTION_NAMES[directions[0]]
            self.set(start, color, tuple(RoutingPosition(p.rx, (*p.tx, leave)) for p in output.positions))
            position = start
            for before, after in zip(directions, directions[1:], strict=False):
                position = (position[0] + DIRECTION_STEPS[before][0], position[1] + DIRECTION_STEPS[before][1])
                self.set(
                    position, color, (RoutingPosition((DIRECTION_NAMES[OPPOSITE[before]],), (DIRECTION_NAMES[after],)),)
                )
            enter = DIRECTION_NAMES[OPPOSITE[directions[-1]]]
            self.set(end, color, tuple(RoutingPosition((enter,), p.tx) for p in input.positions))


def make_color_config(positions: RoutingPositions) -> ColorConfig:
    """Switch positions as a color configuration."""
    first, *more = positions
    return ColorConfig(first.rx, first.tx, tuple(_make_switch_position(p) for p in more))


def _make_switch_position(position: RoutingPosition) -> SwitchPosition:
    if len(position.rx) > 1 or len(position.tx) > 1:
        raise ArgumentError("a switch position has one input and one output", received=str(position))
    rx, tx = (names[0] if names else None for names in (position.rx, position.tx))
    return SwitchPosition(rx, tx)


def write_layout_text(layout: SdkLayout, grid: RouteGrid, numbers: dict[Color, int]) -> str:
    """The layout file that sets the code and params of every PE."""
    lines = [f"@set_rectangle({grid.width}, {grid.height});"]
    for region in layout.regions:
        source = str(Path(region.source).resolve())
        for x, y in region.all():
            params = region.params.get((x, y), {})
            fields = ", ".join(f".{name} = {_format_value(value, numbers)}" for name, value in params.items())
            place = f"{x + region.origin[0]}, {y + region.origin[1]}"
            lines.append(f'@set_tile_code({place}, "{source}", .{{ {fields} }});')
    return "layout {\n  " + "\n  ".join(lines) + "\n}\n"


def _format_value(value: Any, numbers: dict[Color, int]) -> str:
    if isinstance(value, Color):
        # In SDK 2.10 the value of a color param is a number.
        return f"@get_color({numbers[value]})" if not default_language().startswith("2.") else str(numbers[value])
    return repr(value).lower()


def _place_routes(layout: SdkLayout, grid: RouteGrid, numbers: dict[Color, int]) -> None:
    """Place painted routes, then those of connected ports and streams, which replace them."""
    for region in layout.regions:
        dx, dy = region.origin
        for (x, y), row in region.routes.items():
            for color, positions in row.items():
                grid.set((x + dx, y + dy), numbers[color], positions)
    for output, input in layout.connections:
        grid.connect(output, input, numbers[output.color])
    for port in list_stream_ports(layout):
        for place in port.places():
            positions = tuple(RoutingPosition(p.rx or ("HOST",), p.tx or ("HOST",)) for p in port.positions)
            grid.set(place, numbers[port.color], positions)


def list_stream_ports(layout: SdkLayout) -> list[Port]:
    """The ports of host streams."""
    return [port for region in layout.regions for port in region.ports if port.stream]


def measure_extent(regions: list[CodeRegion]) -> tuple[int, int]:
    """The smallest grid that holds all regions, with a margin of one PE for paths."""
    width = max(region.origin[0] + region.width for region in regions) + 1
    height = max(region.origin[1] + region.height for region in regions) + 1
    return width, height


def compile_sdk_layout(layout: SdkLayout, folder: str) -> CompiledProgram:
    """Compile the layout into a program."""
    numbers = number_colors(layout)
    grid = RouteGrid(*measure_extent(layout.regions))
    _place_routes(layout, grid, numbers)
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = Path(folder) / "layout.csl"
    file.write_text(write_layout_text(layout, grid, numbers))
    compiled = compile_program(str(file.resolve()), arch=layout.platform.target.value, sdk=default_language())
    for place, row in grid.routes.items():
        compiled.colors.setdefault(place, {}).update({color: make_color_config(p) for color, p in row.items()})
    symbols = {
        (x + region.origin[0], y + region.origin[1]): row
        for region in layout.regions
        for (x, y), row in region.symbols.items()
    }
    ends = {id(port): (port.places()[0], numbers[port.color]) for port in list_stream_ports(layout)}
    return CompiledProgram(str(Path(folder).resolve()), compiled, ends, symbols)
