"""The channels on which elements talk: colors, and the routes that belong to them."""

from __future__ import annotations

from dataclasses import dataclass

PLACE = {0: "row", 1: "column"}
# Queues 0 and 1 serve the host's copies.
QUEUES, OUTPUTS_OF_WSE2 = range(2, 8), 4


@dataclass(frozen=True)
class Channel:
    """One way of talking along a mesh axis.

    A "way" goes from each element to its neighbour; a "spread" from the last to all; a "ring" from the end of a way to
    its beginning. `step` is where words of the way move: 1 for up the axis.
    """

    kind: str
    name: str
    axis: int
    step: int
    color: int  # a way has this and the next: one for senders at even places, one for those at odd ones

    def routes(self, last: int) -> list[tuple[str, str, str, str]]:
        """The routes as (where, color, from, to); `last` is the last place along the axis."""
        ahead, back = ("EAST", "WEST") if self.axis else ("SOUTH", "NORTH")
        to, source = (ahead, back) if self.step > 0 else (back, ahead)
        place = "x" if self.axis else "y"
        final, first = (last, 0) if self.step > 0 else (0, last)
        own = f"@get_color({self.color})"
        if self.kind == "way":
            sent, taken = (f"@get_color(@as(u16, {self.color} + ({place} + {n}) % 2))" for n in (0, 1))
            return [(f"{place} != {final}", sent, "RAMP", to), (f"{place} != {first}", taken, source, "RAMP")]
        middle = "RAMP, " + back if self.kind == "spread" else source
        begin, end = (last, 0) if self.kind == "spread" else (final, first)
        onward, behind = (back, ahead) if self.kind == "spread" else (source, to)
        inner = f"{place} != {begin} and {place} != {end}"
        return [
            (f"{place} == {begin}", own, "RAMP", onward),
            (f"{place} == {end}", own, behind, "RAMP"),
            (inner, own, behind, middle if self.kind == "spread" else onward),
        ]

    def ends(self, queue: int) -> str:
        """An element's two ends: what it sends on and receives from, with their queues."""
        name, place = self.name, f"pe_{PLACE[self.axis]}"
        colors = [f"@get_color({self.color})"] * 2
        if self.kind == "way":
            colors = [f"@get_color(@as(u16, {self.color} + ({place} + {n}) % 2))" for n in (0, 1)]
        shared = QUEUES[0] + (queue - QUEUES[0]) % OUTPUTS_OF_WSE2
        return (
            f"const send_{name} = {colors[0]};\nconst from_{name} = {colors[1]};\n"
            # WSE-2 has fewer queues for output, but there one serves several colors.
            f'const out_{name} = @get_output_queue(if (@is_arch("wse3")) {queue} else {shared});\n'
            f"const in_{name} = @get_input_queue({queue});\n"
        )


_EAST, _WEST = Channel("way", "east", 1, 1, 0), Channel("way", "west", 1, -1, 2)
_SOUTH, _NORTH = Channel("way", "south", 0, 1, 4), Channel("way", "north", 0, -1, 6)
# Along a mesh axis: the way its places grow, and the way back.
WAYS = {1: (_EAST, _WEST), 0: (_SOUTH, _NORTH)}


def spread(axis: int) -> Channel:
    """From the last along an axis to all others."""
    return Channel("spread", f"spread_{PLACE[axis]}", axis, -1, 8 if axis else 9)


def ring(way: Channel) -> Channel:
    """From the end of a way to its beginning."""
    return Channel("ring", f"ring_{way.name}", way.axis, way.step, 10 + way.color // 2)
