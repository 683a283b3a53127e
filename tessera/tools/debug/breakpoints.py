"""Breakpoints, watchpoints and step goals: where a stepped run stops."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError
from tessera.tools.debug.history import HistoryStep

# A goal decides whether a command stops at a step.
Goal = Callable[[HistoryStep], bool]


@dataclass
class Breakpoint:
    """A source line to stop at, where `condition` holds, optionally in one program or tile."""

    number: int
    line: int
    file: str | None = None
    condition: str | None = None
    program: tuple[int, ...] | None = None
    tile: int | None = None
    reached: bool = False  # whether the run has reached this line

    def here(self, step: HistoryStep) -> bool:
        """Whether a step starts this line."""
        place = step.node.loc
        return step.starts and place.line == self.line and (self.file is None or Path(place.file).name == self.file)

    def wants(self, step: HistoryStep, instance: tuple[int, ...]) -> bool:
        """Whether it applies to an instance."""
        rank = len(step.launch.grid)
        return (self.program is None or instance[:rank] == self.program) and (
            self.tile is None or (step.launch.group > 1 and instance[-1] == self.tile)
        )

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else f"line {self.line}"
        whom = "" if self.program is None else f" for program {self.program}"
        whom += "" if self.tile is None else f", tile {self.tile}"
        return f"breakpoint {self.number}: {where}{whom}" + (f" if {self.condition}" if self.condition else "")


_SYNTAX = re.compile(
    r"(?:(?P<file>[^\s:]+):)?(?P<line>\d+)"
    r"(?:\s+for\s+(?P<program>\d+(?:\s*,\s*\d+)*)(?:\s+tile\s+(?P<tile>\d+))?)?"
    r"(?:\s+if\s+(?P<condition>.+))?$"
)


def parse_breakpoint(number: int, text: str) -> Breakpoint:
    """Parse a breakpoint as typed: `[FILE:]LINE [for PROGRAM [tile TILE]] [if CONDITION]`.

    Raises:
        ArgumentError: the text has another form.

    >>> print(parse_breakpoint(1, "12 for 3, 0 tile 5 if m.max() > 2"))
    breakpoint 1: line 12 for program (3, 0), tile 5 if m.max() > 2
    """
    found = _SYNTAX.match(text.strip())
    if found is None:
        raise ArgumentError(
            f"`{text}` is not a breakpoint", expected="[FILE:]LINE [for PROGRAM [tile TILE]] [if CONDITION]"
        )
    program, tile = found["program"], found["tile"]
    return Breakpoint(
        number, int(found["line"]), found["file"], found["condition"],
        parse_integers(program) if program else None, int(tile) if tile else None,
    )  # fmt: skip


def parse_integers(text: str) -> tuple[int, ...]:
    """Parse whole numbers separated by commas or spaces.

    >>> parse_integers("3, 0")
    (3, 0)
    """
    parts = re.split(r"[\s,()]+", text.strip(" ()"))
    if not all(p.isdigit() for p in parts if p):
        raise ArgumentError(f"`{text}` are not whole numbers", expected="numbers between commas: 3, 0")
    return tuple(int(p) for p in parts if p)


@dataclass
class Watchpoint:
    """An expression evaluated before each line; the run stops when its value changes."""

    text: str
    last: Any = None
    known: bool = False

    def changed(self, now: Any) -> bool:
        """Whether the value differs from the last one; the first value is no change."""
        before, self.last = self.last, np.array(now, copy=True)
        seen, self.known = self.known, True
        return seen and not _equal(before, self.last)


def _equal(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def until_next_line(start: HistoryStep) -> Goal:
    """Until another line begins, in a called function too."""
    return lambda step: step.starts and step is not start


def until_next_line_here(start: HistoryStep) -> Goal:
    """Until another line of this function begins, or one of its callers."""
    depth = start.depth
    return lambda step: step.starts and step is not start and step.depth <= depth


def until_return(start: HistoryStep) -> Goal:
    """Until a line of a caller begins."""
    depth = start.depth
    return lambda step: step.starts and step.depth < depth


def until_ops_run(start: HistoryStep, count: int) -> Goal:
    """Until a number of ops have run (or, backwards, have been undone)."""
    return lambda step: abs(step.number - start.number) >= count


def until_stopped(start: HistoryStep | None = None) -> Goal:
    """Until something else stops the run."""
    return lambda step: False
