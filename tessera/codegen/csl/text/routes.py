"""Fabric routes: the colours on which elements communicate, the routes of each colour, and the queues."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

COORDINATE_NAMES = {0: "row", 1: "column"}
# Queues 0 and 1 serve the host's copies; WSE-2 has fewer for output, but there one serves several colors.
INPUT_QUEUES, WSE2_OUTPUT_QUEUES = range(2, 8), range(2, 6)
NEIGHBOUR, WRAPAROUND, BROADCAST, TOKEN, LOOPBACK = "way", "ring", "spread", "pass", "echo"
QUEUE_PRIORITY = (LOOPBACK, TOKEN, BROADCAST, NEIGHBOUR, WRAPAROUND)
# A router takes words from its neighbour, or in its second position from its element; a control word whose commands
# each advance one router and are then taken away moves the turn on.
SWITCH_CONFIG = ".switches = .{ .pos1 = .{ .rx = RAMP }, .ring_mode = true, .pop_mode = .{ .pop_on_advance = true } }"


@dataclass(frozen=True)
class FabricRoute:
    """The route of a color where a condition on the element's place holds."""

    where: str
    color: str
    source: str
    to: str
    more: str = ""

    @property
    def config(self) -> str:
        """What the layout says of the color."""
        more = f", {self.more}" if self.more else ""
        return f".{{ .routes = .{{ .rx = .{{{self.source}}}, .tx = .{{{self.to}}} }}{more} }}"


@dataclass(frozen=True)
class FabricChannel:
    """One way of talking along a mesh axis.

    A "way" goes from each element to its neighbour; a "ring" from the end of a way to its beginning; a "spread" from
    the last to all others. On a "pass" elements take turns, in the order of their places, in telling the last; on an
    "echo" the last tells all, itself too. `step` is where words of a way move: 1 for up the axis.
    """

    kind: str
    name: str
    axis: int
    step: int
    color: int  # a way has this and the next: one for senders at even places, one for those at odd ones

    def routes(self, last: int) -> list[FabricRoute]:
        """The routes; `last` is the last place along the axis."""
        found: list[FabricRoute] = getattr(self, f"_{self.kind}")(last, "x" if self.axis else "y", *self._directions())
        return found

    def _directions(self) -> tuple[str, str]:
        """Where words of the channel move, and where they come from."""
        ahead, back = ("EAST", "WEST") if self.axis else ("SOUTH", "NORTH")
        return (ahead, back) if self.step > 0 else (back, ahead)

    @property
    def colors(self) -> tuple[int, ...]:
        """The colors it has."""
        return (self.color, self.color + 1) if self.kind == NEIGHBOUR else (self.color,)

    @property
    def _own(self) -> str:
        return f"@get_color({self.color})"

    def _way(self, last: int, place: str, to: str, source: str) -> list[FabricRoute]:
        final, first = (last, 0) if self.step > 0 else (0, last)
        sent, taken = (f"@get_color(@as(u16, {self.color} + ({place} + {n}) % 2))" for n in (0, 1))
        return [
            FabricRoute(f"{place} != {final}", sent, "RAMP", to),
            FabricRoute(f"{place} != {first}", taken, source, "RAMP"),
        ]

    def _ring(self, last: int, place: str, to: str, source: str) -> list[FabricRoute]:
        """From the end of a way back past all others to its beginning."""
        final, first = (last, 0) if self.step > 0 else (0, last)
        return [
            FabricRoute(f"{place} == {final}", self._own, "RAMP", source),
            FabricRoute(f"{place} == {first}", self._own, to, "RAMP"),
            FabricRoute(f"{place} != {final} and {place} != {first}", self._own, to, source),
        ]

    def _pass(self, last: int, place: str, to: str, source: str) -> list[FabricRoute]:
        return [
            FabricRoute(f"{place} == 0", self._own, "RAMP", to, SWITCH_CONFIG),
            FabricRoute(f"{place} == {last}", self._own, source, "RAMP"),
            FabricRoute(f"{place} != 0 and {place} != {last}", self._own, source, to, SWITCH_CONFIG),
        ]

    def _spread(self, last: int, place: str, to: str, source: str, back: str = "") -> list[FabricRoute]:
        return [
            FabricRoute(f"{place} == {last}", self._own, "RAMP", f"{to}{back}"),
            FabricRoute(f"{place} == 0", self._own, source, "RAMP"),
            FabricRoute(f"{place} != 0 and {place} != {last}", self._own, source, f"{to}, RAMP"),
        ]

    def _echo(self, last: int, place: str, to: str, source: str) -> list[FabricRoute]:
        return self._spread(last, place, to, source, ", RAMP")

    def ends(self, queues: ChannelQueues) -> str:
        """An element's two ends: what it sends on and receives from, with their queues."""
        name, place = self.name, f"pe_{COORDINATE_NAMES[self.axis]}"
        colors = [self._own] * 2
        if self.kind == NEIGHBOUR:
            colors = [f"@get_color(@as(u16, {self.color} + ({place} + {n}) % 2))" for n in (0, 1)]
        return (
            f"const send_{name} = {colors[0]};\nconst from_{name} = {colors[1]};\n"
            f'const out_{name} = @get_output_queue(if (@is_arch("wse3")) {queues.output} else {queues.narrow});\n'
            f"const in_{name} = @get_input_queue({queues.input});\n"
        )


@dataclass(frozen=True)
class ChannelQueues:
    """The queues of a channel: for input, for output, and for output on WSE-2."""

    input: int
    output: int
    narrow: int


def assign_queues(channels: Iterable[FabricChannel]) -> dict[FabricChannel, ChannelQueues]:
    """The queues of a program's channels; of operations under way at once none share a number.

    Those are along an axis what comes by an echo, what goes on a pass, and at the last place what goes on the echo; or
    what comes and goes by a way or its ring. WSE-2's microthreads have the numbers of queues.
    """
    ranked = sorted(channels, key=lambda c: QUEUE_PRIORITY.index(c.kind))
    found = {}
    for channel, number in zip(ranked, reversed(INPUT_QUEUES), strict=False):
        apart = 2 if channel.kind in (LOOPBACK, BROADCAST) else 0
        found[channel] = ChannelQueues(number, number, WSE2_OUTPUT_QUEUES[channel.axis + apart])
    return found


_EAST, _WEST = FabricChannel(NEIGHBOUR, "east", 1, 1, 0), FabricChannel(NEIGHBOUR, "west", 1, -1, 2)
_SOUTH, _NORTH = FabricChannel(NEIGHBOUR, "south", 0, 1, 4), FabricChannel(NEIGHBOUR, "north", 0, -1, 6)
# Along a mesh axis: the way its places grow, and the way back.
NEIGHBOUR_CHANNELS = {1: (_EAST, _WEST), 0: (_SOUTH, _NORTH)}


def get_broadcast_channel(axis: int) -> FabricChannel:
    """From the last along an axis to all others."""
    return FabricChannel(BROADCAST, f"spread_{COORDINATE_NAMES[axis]}", axis, -1, 8 if axis else 9)


def get_loopback_channel(axis: int) -> FabricChannel:
    """From the last along an axis to all, itself too."""
    return FabricChannel(LOOPBACK, f"echo_{COORDINATE_NAMES[axis]}", axis, -1, 18 if axis else 19)


def get_wraparound_channel(way: FabricChannel) -> FabricChannel:
    """From the end of a way to its beginning."""
    return FabricChannel(WRAPAROUND, f"ring_{way.name}", way.axis, way.step, (10, 11, 14, 15)[way.color // 2])


def get_token_channel(axis: int) -> FabricChannel:
    """From each along an axis, in turn, to the last: on a color that has switches on either machine."""
    return FabricChannel(TOKEN, f"pass_{COORDINATE_NAMES[axis]}", axis, 1, 16 if axis else 17)
