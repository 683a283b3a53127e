"""The part of a PE that gives its queues other colors while it runs, and learns when they have run empty."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tessera.interp.target.csl.faults import CslFault

if TYPE_CHECKING:
    from tessera.interp.target.csl.program import Program
    from tessera.interp.target.csl.sema.tables import Task

Queue = tuple[str, int]  # "in" or "out", and a number


class Flushing:
    """Queues of one PE that change: their colors, and what is called when they are empty."""

    program: Program
    fabric: Any
    space: dict[str, Any]
    in_colors: dict[int, int]
    out_colors: dict[int, int]
    data: dict[int, Task]
    heads: dict[int, None]
    calls: deque[tuple[str, Callable[..., Any], tuple[Any, ...]]]
    flushed: dict[Queue, None]

    if TYPE_CHECKING:

        def wake(self) -> None: ...

    def torn_down(self, color: int) -> None:
        """A teardown reached this color: call its handler, if it has one."""
        self._handle([self.program.tables.teardown.get(color)])

    def flush(self, side: str, number: int) -> None:
        """`@queue_flush`: call the queue's handler as soon as it is empty."""
        if (side, number) not in self.program.tables.emptied:
            raise CslFault(f"{side}put queue {number} is flushed but has no '@set_empty_queue_handler'")
        self.fabric.when_empty(side, self._color_of_queue(side, number), lambda: self._emptied((side, number)))

    def _color_of_queue(self, side: str, number: int) -> int:
        colors = self.in_colors if side == "in" else self.out_colors
        if number not in colors:
            raise CslFault(f"{side}put queue {number} is not initialized")
        return colors[number]

    def _emptied(self, queue: Queue) -> None:
        self.flushed[queue] = None
        self._handle([])

    def _handle(self, names: list[str | None]) -> None:
        """The teardown task: the handlers of an event, and those of all queues whose flush was not left."""
        names += [self.program.tables.emptied[queue] for queue in self.flushed]
        for name in names:
            if name is not None:
                self.calls.append((name, self.space[name], ()))
                self.wake()

    def leave_flush(self, side: str, number: int) -> None:
        """`queue_flush.exit()`: the handler is not called any more."""
        self.flushed.pop((side, number), None)

    def rebind(self, side: str, number: int, color: int) -> None:
        """Give a queue another color."""
        before = self._color_of_queue(side, number)
        empty = not self.fabric.queue(before).words if side == "in" else self.fabric.output_empty(before)
        if not empty:
            raise CslFault(f"{side}put queue {number} is given color {color} while words of color {before} are in it")
        if side == "out":
            self.out_colors[number] = color
            return
        self.in_colors[number] = color
        if before in self.data and self.data[before].number == number:
            self.data[color] = self.data.pop(before)
        self.heads[color] = None
        self.wake()
