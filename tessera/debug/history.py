"""What a stepped run has done: each node with its operands and results, and memory as it was before it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tessera.interp.checked.observe import Started
from tessera.interp.checked.shadow import address, span
from tessera.interp.machine import Machine
from tessera.interp.memory import Memory
from tessera.ir.core import Node
from tessera.numerics.bounded import Bounded
from tessera.ops import checks, tile

# Once a history holds more than this, its older half is forgotten.
BYTES = 1 << 28


@dataclass
class Kept:
    """A stretch of memory: what it holds now, and a copy that follows it."""

    low: int
    live: np.ndarray
    copy: np.ndarray
    keeper: object  # the array, so that its memory is not used again

    @classmethod
    def of(cls, array: np.ndarray) -> Kept:
        """The memory of an array."""
        low, high = span(array)
        unit = array.itemsize if array.itemsize in (1, 2, 4, 8) and (high - low) % array.itemsize == 0 else 1
        live = np.frombuffer((ctypes.c_ubyte * (high - low)).from_address(low), f"u{unit}")
        return cls(low, live, live.copy(), array)

    def change(self) -> Change | None:
        """What has changed since the last call."""
        places = np.flatnonzero(self.live != self.copy)
        if not places.size:
            return None
        before = self.copy[places]
        self.copy[places] = self.live[places]
        return Change(self, places, before)


@dataclass
class Change:
    """What some places of a memory held before a node wrote there."""

    memory: Kept
    places: np.ndarray
    before: np.ndarray


@dataclass(eq=False)
class Step:
    """One node run once for the instances of a box: before it ran, and once it has, what came of it.

    `calls` are the lines in force, the kernel's first, then those of functions it called; `starts` says whether a
    line begins here.
    """

    number: int
    node: Node
    args: Sequence[Any]
    launch: Started
    first: tuple[int, ...]
    count: tuple[int, ...]
    active: np.ndarray | None
    calls: tuple[Step, ...]
    starts: bool
    results: Sequence[Any] = ()
    changes: list[Change] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """How many calls lie between the kernel and this step."""
        return max(0, len(self.calls) - 1)

    def place(self, instance: tuple[int, ...]) -> tuple[int, ...] | None:
        """Where an instance stands among those of this step; None where it is not one of them."""
        found = tuple(i - f for i, f in zip(instance, self.first, strict=False))
        if len(instance) != len(self.first) or not all(0 <= i < n for i, n in zip(found, self.count, strict=True)):
            return None
        return found if self.active is None or np.broadcast_to(self.active, self.count)[found] else None

    def instances(self) -> Iterator[tuple[int, ...]]:
        """The instances that run this step."""
        running = np.ones(self.count, bool) if self.active is None else np.broadcast_to(self.active, self.count)
        return (tuple(int(i) + f for i, f in zip(place, self.first, strict=True)) for place in np.argwhere(running))


class History:
    """The steps of a run, the oldest of which may have been forgotten."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.forgotten = 0
        self.size = 0
        self.kept: dict[int, Kept] = {}
        self.calls: tuple[Step, ...] = ()
        self._outer: list[tuple[Step, ...]] = []  # the calls of launches that wait for this one
        # Of each launch the number of its first step, and its arguments as they were.
        self.began: dict[int, tuple[int, list[Any]]] = {}

    def enter(self, started: Started) -> None:
        """Follow the memory of a launch's arguments; values of a Graph function never change."""
        self._outer.append(self.calls)
        self.calls = ()
        before = [a.copy() if isinstance(a, np.ndarray) else a for a in started.args]
        self.began[id(started)] = self.forgotten + len(self.steps), before
        for array in () if started.is_graph else started.args:
            self.keep(array)

    def leave(self) -> None:
        """A launch has ended: what called it goes on."""
        self.calls = self._outer.pop()

    def keep(self, array: Any) -> None:
        """Follow the memory of an array."""
        if isinstance(array, np.ndarray) and array.size:
            kept = Kept.of(array)
            self.kept[kept.low] = kept

    def begin(self, node: Node, args: Sequence[Any], machine: Machine, launch: Started) -> Step:
        """A node that is about to run."""
        marked = node.op in (checks.line, checks.pause)
        around = None if marked else self._around(node, launch)
        starts = node.op is checks.line or (not marked and around is None)
        step = Step(
            self.forgotten + len(self.steps), node, args, launch, machine.first, machine.count, machine.active,
            self.calls, starts,
        )  # fmt: skip
        if marked or starts:
            calls = self.calls[: node.attrs.get("depth", 0)] if marked or not launch.is_graph else self._marks
            self.calls = (*calls, step)
        elif around is not None:
            self.calls = around
        step.calls = self.calls
        self.steps.append(step)
        return step

    def _around(self, node: Node, launch: Started) -> tuple[Step, ...] | None:
        """The calls, up to the one whose line a node belongs to; None where it begins a line by itself."""
        if self._marks and not launch.is_graph:
            return self.calls
        # A trace has marks where Python came to a line: what a call came back to has to be found.
        place = node.loc.file, node.loc.line
        found = [n for n, c in enumerate(self.calls) if (c.node.loc.file, c.node.loc.line) == place]
        return self.calls[: found[-1] + 1] if found else None

    @property
    def _marks(self) -> tuple[Step, ...]:
        """The calls in force that marks have told of."""
        return tuple(c for c in self.calls if c.node.op in (checks.line, checks.pause))

    def end(self, step: Step, results: Sequence[Any]) -> None:
        """What came of a node."""
        step.results = results
        if step.node.op is tile.alloc:
            self.keep(results[0].array)
        elif not step.node.regions and step.node.op.effects & {"write"}:
            found = (kept.change() for kept in list(self.kept.values()))
            step.changes = [change for change in found if change is not None]
        self.size += (
            sum(getattr(r, "nbytes", 64) for r in results) + sum(9 * c.before.nbytes for c in step.changes) + 256
        )
        if self.size > BYTES:
            self._forget()

    def close(self) -> Step:
        """A last step that stands for the end of the run."""
        last = self.steps[-1]
        self.steps.append(replace(last, number=last.number + 1, starts=False, changes=[]))
        return self.steps[-1]

    def _forget(self) -> None:
        half = len(self.steps) // 2
        del self.steps[:half]
        self.forgotten += half
        self.size //= 2

    def after(self, step: Step) -> Iterator[Step]:
        """The steps after one, in order."""
        return iter(self.steps[step.number - self.forgotten + 1 :])

    def before(self, step: Step) -> Iterator[Step]:
        """The steps before one, the latest first."""
        return reversed(self.steps[: max(0, step.number - self.forgotten)])

    def memory(self, memory: Memory, step: Step) -> np.ndarray:
        """What a memory held when a step was about to run."""
        array = memory.array.value if isinstance(memory.array, Bounded) else memory.array
        place = address(array)
        kept = next((k for k in self.kept.values() if k.low <= place < k.low + k.live.nbytes), None)
        if kept is None or not array.size:
            return array
        held = kept.live.copy()
        for each in reversed(self.steps[max(0, step.number - self.forgotten) :]):
            for change in each.changes:
                if change.memory is kept:
                    held[change.places] = change.before
        return np.ndarray(array.shape, array.dtype, held.view(np.uint8).data, place - kept.low, array.strides)
