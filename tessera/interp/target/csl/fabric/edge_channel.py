"""Edge channel: where words go that leave the program rectangle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.interp.target.csl.fabric.routing import CONTROL_FLAG, DIRECTION_NAMES, RAMP
from tessera.interp.target.csl.fabric.word_buffer import Run, WordBuffer

if TYPE_CHECKING:
    from tessera.interp.target.csl.fabric.router import RouterChannel


class EdgeChannel:
    """The side of the rectangle that a route of an edge PE leaves by.

    A host's stream of the color at that PE takes its data words, as the memcpy frame does; without one they are lost.
    """

    def __init__(self, channel: RouterChannel) -> None:
        self.channel, self.granted = channel, 0
        self.inputs = tuple([WordBuffer(channel.depth) for _ in DIRECTION_NAMES])  # always empty

    def count_accepted(self, direction: int, wanted: int, steps: list[int] | None = None) -> int:
        """The number of words that may leave: all."""
        return wanted

    def extend(self, direction: int, runs: list[Run], count: int, marked: int = 0) -> None:
        """Accept words in order."""
        self.channel.get_host_sink().take(word for _, words in runs for word in words if not word & CONTROL_FLAG)

    def append(self, buffer: WordBuffer, run: Run, count: int) -> None:
        """Accept words in order."""
        self.extend(RAMP, [run], count)

    def check_direction(self, direction: int) -> None:
        """Accept words from every direction."""

    def receive(self, direction: int, time: int, word: int) -> None:
        """Accept a word."""
        self.extend(direction, [(time, [word])], 1)
