"""Fabric routes: the colours on which PEs communicate, the routes of each colour, and the queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

COORDINATE_NAMES = {0: "row", 1: "column"}
# memcpy uses queues 0 and 1. WSE-2 has fewer output queues, but there one queue serves several colours.
INPUT_QUEUES, WSE2_OUTPUT_QUEUES = range(2, 8), range(2, 6)
NEIGHBOUR, WRAPAROUND, BROADCAST, TOKEN, LOOPBACK = "neighbour", "wraparound", "broadcast", "token", "loopback"
QUEUE_PRIORITY = (LOOPBACK, TOKEN, BROADCAST, NEIGHBOUR, WRAPAROUND)
# Switch position 0 takes wavelets from the neighbour, position 1 from the PE. A control wavelet passes the turn on:
# each of its commands advances one router, which then removes the command.
SWITCH_CONFIG = ".switches = .{ .pos1 = .{ .rx = RAMP }, .ring_mode = true, .pop_mode = .{ .pop_on_advance = true } }"


@dataclass(frozen=True)
class FabricRoute:
    """The route of a colour on the PEs that satisfy a condition."""

    where: str
    color: str
    source: str
    to: str
    more: str = ""

    @property
    def config(self) -> str:
        """The color configuration in the layout."""
        more = f", {self.more}" if self.more else ""
        return f".{{ .routes = .{{ .rx = .{{{self.source}}}, .tx = .{{{self.to}}} }}{more} }}"


@dataclass(frozen=True)
class FabricChannel:
    """A communication pattern along a mesh axis.

    `NEIGHBOUR` sends from each PE to its neighbour; `WRAPAROUND` from the last PE of a neighbour channel to its first;
    `BROADCAST` from the last PE to all others. On `TOKEN` PEs take turns, in coordinate order, to send to the last PE;
    on `LOOPBACK` the last PE sends to all PEs, itself included. `step` is the direction of a neighbour channel: 1 for
    increasing coordinates.
    """

    kind: str
    name: str
    axis: int
    step: int
    color: int  # a neighbour channel has two colours: this one for senders at even coordinates, the next for odd ones

    def routes(self, last: int) -> list[FabricRoute]:
        """The routes; `last` is the last coordinate along the axis."""
        coordinate = "x" if self.axis else "y"
        return ROUTE_PATTERNS[self.kind](self, last, coordinate, *self._find_directions())

    def _find_directions(self) -> tuple[str, str]:
        """The direction of the channel's wavelets, and the direction they come from."""
        ahead, back = ("EAST", "WEST") if self.axis else ("SOUTH", "NORTH")
        return (ahead, back) if self.step > 0 else (back, ahead)

    @property
    def colors(self) -> tuple[int, ...]:
        """The colours of the channel."""
        return (self.color, self.color + 1) if self.kind == NEIGHBOUR else (self.color,)

    @property
    def own_color(self) -> str:
        return f"@get_color({self.color})"

    def format_declarations(self, queues: ChannelQueues) -> str:
        """The declarations of a PE's send and receive colours, with their queues."""
        name, coordinate = self.name, f"pe_{COORDINATE_NAMES[self.axis]}"
        colors = [self.own_color] * 2
        if self.kind == NEIGHBOUR:
            colors = [f"@get_color(@as(u16, {self.color} + ({coordinate} + {n}) % 2))" for n in (0, 1)]
        return (
            f"const send_{name} = {colors[0]};\nconst from_{name} = {colors[1]};\n"
            f'const out_{name} = @get_output_queue(if (@is_arch("wse3")) {queues.output} else {queues.narrow});\n'
            f"const in_{name} = @get_input_queue({queues.input});\n"
        )


def _route_neighbours(channel: FabricChannel, last: int, coordinate: str, to: str, source: str) -> list[FabricRoute]:
    final, first = (last, 0) if channel.step > 0 else (0, last)
    sent, received = (f"@get_color(@as(u16, {channel.color} + ({coordinate} + {n}) % 2))" for n in (0, 1))
    return [
        FabricRoute(f"{coordinate} != {final}", sent, "RAMP", to),
        FabricRoute(f"{coordinate} != {first}", received, source, "RAMP"),
    ]


def _route_wraparound(channel: FabricChannel, last: int, coordinate: str, to: str, source: str) -> list[FabricRoute]:
    """Routes from the last PE past all others to the first."""
    final, first = (last, 0) if channel.step > 0 else (0, last)
    return [
        FabricRoute(f"{coordinate} == {final}", channel.own_color, "RAMP", source),
        FabricRoute(f"{coordinate} == {first}", channel.own_color, to, "RAMP"),
        FabricRoute(f"{coordinate} != {final} and {coordinate} != {first}", channel.own_color, to, source),
    ]


def _route_token(channel: FabricChannel, last: int, coordinate: str, to: str, source: str) -> list[FabricRoute]:
    return [
        FabricRoute(f"{coordinate} == 0", channel.own_color, "RAMP", to, SWITCH_CONFIG),
        FabricRoute(f"{coordinate} == {last}", channel.own_color, source, "RAMP"),
        FabricRoute(f"{coordinate} != 0 and {coordinate} != {last}", channel.own_color, source, to, SWITCH_CONFIG),
    ]


def _route_broadcast(
    channel: FabricChannel, last: int, coordinate: str, to: str, source: str, back: str = ""
) -> list[FabricRoute]:
    return [
        FabricRoute(f"{coordinate} == {last}", channel.own_color, "RAMP", f"{to}{back}"),
        FabricRoute(f"{coordinate} == 0", channel.own_color, source, "RAMP"),
        FabricRoute(f"{coordinate} != 0 and {coordinate} != {last}", channel.own_color, source, f"{to}, RAMP"),
    ]


def _route_loopback(channel: FabricChannel, last: int, coordinate: str, to: str, source: str) -> list[FabricRoute]:
    return _route_broadcast(channel, last, coordinate, to, source, ", RAMP")


ROUTE_PATTERNS: dict[str, Callable[..., list[FabricRoute]]] = {
    NEIGHBOUR: _route_neighbours,
    WRAPAROUND: _route_wraparound,
    BROADCAST: _route_broadcast,
    TOKEN: _route_token,
    LOOPBACK: _route_loopback,
}


@dataclass(frozen=True)
class ChannelQueues:
    """The queues of a channel: input, output, and output on WSE-2."""

    input: int
    output: int
    narrow: int


def assign_queues(channels: Iterable[FabricChannel]) -> dict[FabricChannel, ChannelQueues]:
    """Assign queues to the channels of a program; channels that are in use at the same time get different queues.

    Along one axis these are the receive of a loopback channel, the send of a token channel, and on the last PE the send
    of the loopback channel; or the receive and send of a neighbour channel or its wraparound. On WSE-2 the number of a
    queue is also that of its microthread.
    """
    ranked = sorted(channels, key=lambda c: QUEUE_PRIORITY.index(c.kind))
    queues = {}
    for channel, number in zip(ranked, reversed(INPUT_QUEUES), strict=False):
        offset = 2 if channel.kind in (LOOPBACK, BROADCAST) else 0
        queues[channel] = ChannelQueues(number, number, WSE2_OUTPUT_QUEUES[channel.axis + offset])
    return queues


_EAST, _WEST = FabricChannel(NEIGHBOUR, "east", 1, 1, 0), FabricChannel(NEIGHBOUR, "west", 1, -1, 2)
_SOUTH, _NORTH = FabricChannel(NEIGHBOUR, "south", 0, 1, 4), FabricChannel(NEIGHBOUR, "north", 0, -1, 6)
# Along a mesh axis: increasing coordinates, and decreasing coordinates.
NEIGHBOUR_CHANNELS = {1: (_EAST, _WEST), 0: (_SOUTH, _NORTH)}


def get_broadcast_channel(axis: int) -> FabricChannel:
    """From the last PE along an axis to all others."""
    return FabricChannel(BROADCAST, f"spread_{COORDINATE_NAMES[axis]}", axis, -1, 8 if axis else 9)


def get_loopback_channel(axis: int) -> FabricChannel:
    """From the last PE along an axis to all PEs, itself included."""
    return FabricChannel(LOOPBACK, f"echo_{COORDINATE_NAMES[axis]}", axis, -1, 18 if axis else 19)


def get_wraparound_channel(neighbour: FabricChannel) -> FabricChannel:
    """From the last PE of a neighbour channel to its first."""
    return FabricChannel(
        WRAPAROUND, f"ring_{neighbour.name}", neighbour.axis, neighbour.step, (10, 11, 14, 15)[neighbour.color // 2]
    )


def get_token_channel(axis: int) -> FabricChannel:
    """From each PE along an axis, in turn, to the last; its colours have switches on both architectures."""
    return FabricChannel(TOKEN, f"pass_{COORDINATE_NAMES[axis]}", axis, 1, 16 if axis else 17)
