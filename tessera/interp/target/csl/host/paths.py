"""From code regions to a layout: numbers for colors, paths between ports, one route for each color at each PE."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.errors import ArgumentError, ResourceError
from tessera.interp.target.csl.commands import Place
from tessera.interp.target.csl.host.cslc import language
from tessera.interp.target.csl.host.regions import CodeRegion, Color, Port, RoutingPosition, SdkLayout
from tessera.interp.target.csl.layout import Layout, compile_program
from tessera.interp.target.csl.routes import NAMES, OPPOSITE, STEP
from tessera.interp.target.csl.values import ColorConfig, SwitchPosition

COLORS = 24
Positions = tuple[RoutingPosition, ...]


@dataclass(frozen=True)
class Compiled:
    """A compiled `SdkLayout`: the program, and where its streams meet it."""

    folder: str
    layout: Layout
    streams: dict[int, tuple[Place, int]]
    symbols: dict[Place, dict[str, Any]]


def number_colors(layout: SdkLayout) -> dict[Color, int]:
    """A number for each color; the colors of connected ports share one.

    Raises:
        ResourceError: there are more than the machine has.
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
    free = iter(sorted(set(range(COLORS)) - set(fixed.values())))
    numbers: dict[Color, int] = {}
    for color in parent:
        top = root(color)
        if top not in numbers:
            number = fixed[top] if top in fixed else next(free, None)
            if number is None:
                raise ResourceError(f"the layout needs more than {COLORS} colors")
            numbers[top] = number
        numbers[color] = numbers[top]
    return numbers


class Grid:
    """Routes as they are found: for each PE, each color's positions."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.routes: dict[Place, dict[int, Positions]] = {}

    def set(self, place: Place, color: int, positions: Positions) -> None:
        """Route a color at a PE."""
        self.routes.setdefault(place, {})[color] = positions

    def path(self, start: Place, end: Place, color: int, first: str, port: str) -> list[int]:
        """Directions of a shortest way from `start` to `end` over PEs that do not route the color.

        Raises:
            ResourceError: there is none.
        """
        order = sorted(range(4), key=lambda d: NAMES[d] != first)
        came: dict[Place, tuple[Place, int]] = {start: (start, -1)}
        queue = deque([start])
        while queue and end not in came:
            here = queue.popleft()
            for direction in order:
                there = (here[0] + STEP[direction][0], here[1] + STEP[direction][1])
                inside = 0 <= there[0] < self.width and 0 <= there[1] < self.height
                if inside and there not in came and (there == end or color not in self.routes.get(there, {})):
                    came[there] = (here, direction)
                    queue.append(there)
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
            ways = self.path(start, end, color, output.edge.value, output.color.name)
            leave = NAMES[ways[0]]
            self.set(start, color, tuple(RoutingPosition(p.rx, (*p.tx, leave)) for p in output.positions))
            here = start
            for before, after in zip(ways, ways[1:], strict=False):
                here = (here[0] + STEP[before][0], here[1] + STEP[before][1])
                self.set(here, color, (RoutingPosition((NAMES[OPPOSITE[before]],), (NAMES[after],)),))
            enter = NAMES[OPPOSITE[ways[-1]]]
            self.set(end, color, tuple(RoutingPosition((enter,), p.tx) for p in input.positions))


def config(positions: Positions) -> ColorConfig:
    """Positions as the configuration of a color."""
    first, *more = positions
    return ColorConfig(first.rx, first.tx, tuple(_switch(p) for p in more))


def _switch(position: RoutingPosition) -> SwitchPosition:
    if len(position.rx) > 1 or len(position.tx) > 1:
        raise ArgumentError("a switch position has one input and one output", received=str(position))
    rx, tx = (names[0] if names else None for names in (position.rx, position.tx))
    return SwitchPosition(rx, tx)


def text(layout: SdkLayout, grid: Grid, numbers: dict[Color, int]) -> str:
    """The layout file that sets every PE's code and params."""
    lines = [f"@set_rectangle({grid.width}, {grid.height});"]
    for region in layout.regions:
        source = str(Path(region.source).resolve())
        for x, y in region.all():
            params = region.params.get((x, y), {})
            fields = ", ".join(f".{name} = {_value(value, numbers)}" for name, value in params.items())
            place = f"{x + region.origin[0]}, {y + region.origin[1]}"
            lines.append(f'@set_tile_code({place}, "{source}", .{{ {fields} }});')
    return "layout {\n  " + "\n  ".join(lines) + "\n}\n"


def _value(value: Any, numbers: dict[Color, int]) -> str:
    if isinstance(value, Color):
        # A color is a number to the programs of SDK 2.10.
        return f"@get_color({numbers[value]})" if language() == "1.4" else str(numbers[value])
    return repr(value).lower()


def _lay(layout: SdkLayout, grid: Grid, numbers: dict[Color, int]) -> None:
    """Painted routes first, then those of connected ports and streams, which take their place."""
    for region in layout.regions:
        dx, dy = region.origin
        for (x, y), row in region.routes.items():
            for color, positions in row.items():
                grid.set((x + dx, y + dy), numbers[color], positions)
    for output, input in layout.connections:
        grid.connect(output, input, numbers[output.color])
    for port in streams(layout):
        for place in port.places():
            positions = tuple(RoutingPosition(p.rx or ("HOST",), p.tx or ("HOST",)) for p in port.positions)
            grid.set(place, numbers[port.color], positions)


def streams(layout: SdkLayout) -> list[Port]:
    """The ports that the host talks to."""
    return [port for region in layout.regions for port in region.ports if port.stream]


def extent(regions: list[CodeRegion]) -> tuple[int, int]:
    """The least grid that holds all regions, with a PE around them for paths."""
    width = max(region.origin[0] + region.width for region in regions) + 1
    height = max(region.origin[1] + region.height for region in regions) + 1
    return width, height


def assemble(layout: SdkLayout, folder: str) -> Compiled:
    """Compile the layout into a program."""
    numbers = number_colors(layout)
    grid = Grid(*extent(layout.regions))
    _lay(layout, grid, numbers)
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = Path(folder) / "layout.csl"
    file.write_text(text(layout, grid, numbers))
    compiled = compile_program(str(file.resolve()), arch=layout.platform.target.value, sdk=language())
    for place, row in grid.routes.items():
        compiled.colors.setdefault(place, {}).update({color: config(p) for color, p in row.items()})
    symbols = {
        (x + region.origin[0], y + region.origin[1]): row
        for region in layout.regions
        for (x, y), row in region.symbols.items()
    }
    ends = {id(port): (port.places()[0], numbers[port.color]) for port in streams(layout)}
    return Compiled(str(Path(folder).resolve()), compiled, ends, symbols)
