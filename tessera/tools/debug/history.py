"""Execution history (record and replay): nodes with operands and results, memory before each."""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tessera.core.device import array_address, array_span
from tessera.core.types import TensorType
from tessera.interp.observers import ObservedLaunch
from tessera.interp.tile.affine import AffineScalar
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import InstanceMemory
from tessera.ir.core import Node, Value
from tessera.ir.numerics.interval_arithmetic import IntervalArray
from tessera.ops.dialects import tile

# What a stepped run has done: each node with its operands and results, and memory as it was before it.


# Above this size a history drops its older half.
BYTES = 1 << 28


@dataclass
class TrackedMemory:
    """A tracked range of memory, and a copy of its last contents."""

    low: int
    live: np.ndarray
    copy: np.ndarray
    owner: object  # the array, kept alive so that its memory is not reused

    @classmethod
    def of(cls, array: np.ndarray) -> TrackedMemory:
        """The memory of an array."""
        low, high = array_span(array)
        unit = array.itemsize if array.itemsize in (1, 2, 4, 8) and (high - low) % array.itemsize == 0 else 1
        live = np.frombuffer((ctypes.c_ubyte * (high - low)).from_address(low), f"u{unit}")
        return cls(low, live, live.copy(), array)

    def change(self) -> MemoryChange | None:
        """Find what has changed since the last call."""
        places = np.flatnonzero(self.live != self.copy)
        if not places.size:
            return None
        before = self.copy[places]
        self.copy[places] = self.live[places]
        return MemoryChange(self, places, before)


@dataclass
class MemoryChange:
    """The values of some elements of a memory before a node wrote them."""

    memory: TrackedMemory
    places: np.ndarray
    before: np.ndarray


@dataclass(eq=False)
class HistoryStep:
    """One execution of a node for the instances of a box, with its operands and, afterwards, its results.

    `calls` are the lines in force, the kernel's first, then those of functions it called; `starts` says whether a
    line begins here.
    """

    number: int
    node: Node
    args: Sequence[Any]
    launch: ObservedLaunch
    first: tuple[int, ...]
    count: tuple[int, ...]
    active: np.ndarray | None
    calls: tuple[HistoryStep, ...]
    starts: bool
    results: Sequence[Any] = ()
    changes: list[MemoryChange] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """The call depth of this step."""
        return max(0, len(self.calls) - 1)

    def place(self, instance: tuple[int, ...]) -> tuple[int, ...] | None:
        """The index of an instance among those of this step, or None."""
        found = tuple(i - f for i, f in zip(instance, self.first, strict=False))
        if len(instance) != len(self.first) or not all(0 <= i < n for i, n in zip(found, self.count, strict=True)):
            return None
        return found if self.active is None or np.broadcast_to(self.active, self.count)[found] else None

    def instances(self) -> Iterator[tuple[int, ...]]:
        """The instances that run this step."""
        running = np.ones(self.count, bool) if self.active is None else np.broadcast_to(self.active, self.count)
        return (tuple(int(i) + f for i, f in zip(place, self.first, strict=True)) for place in np.argwhere(running))


class ExecutionHistory:
    """The steps of a run; the oldest may have been dropped."""

    def __init__(self) -> None:
        self.steps: list[HistoryStep] = []
        self.forgotten = 0
        self.size = 0
        self.kept: dict[int, TrackedMemory] = {}
        self.calls: tuple[HistoryStep, ...] = ()
        self._outer: list[tuple[HistoryStep, ...]] = []  # the frames of the launches that called this one
        # For each launch the number of its first step, and a copy of its arguments.
        self.began: dict[int, tuple[int, list[Any]]] = {}

    def enter(self, started: ObservedLaunch) -> None:
        """Track the memory of a launch's arguments; values of a Graph function never change."""
        self._outer.append(self.calls)
        self.calls = ()
        before = [a.copy() if isinstance(a, np.ndarray) else a for a in started.args]
        self.began[id(started)] = self.forgotten + len(self.steps), before
        for array in () if started.is_graph else started.args:
            self.keep(array)

    def leave(self) -> None:
        """End a launch and return to its caller."""
        self.calls = self._outer.pop()

    def keep(self, array: Any) -> None:
        """Track the memory of an array."""
        if isinstance(array, np.ndarray) and array.size:
            kept = TrackedMemory.of(array)
            self.kept[kept.low] = kept

    def begin(self, node: Node, args: Sequence[Any], machine: TileMachine, launch: ObservedLaunch) -> HistoryStep:
        """Record a node that is about to run."""
        marked = node.op in (tile.line, tile.pause)
        around = None if marked else self._enclosing_calls(node, launch)
        starts = node.op is tile.line or (not marked and around is None)
        step = HistoryStep(
            self.forgotten + len(self.steps), node, args, launch, machine.first, machine.count, machine.active,
            self.calls, starts,
        )  # fmt: skip
        if marked or starts:
            calls = (
                self.calls[: node.attrs.get("depth", 0)] if marked or not launch.is_graph else self._calls_from_marks
            )
            self.calls = (*calls, step)
        elif around is not None:
            self.calls = around
        step.calls = self.calls
        self.steps.append(step)
        return step

    def _enclosing_calls(self, node: Node, launch: ObservedLaunch) -> tuple[HistoryStep, ...] | None:
        """The calls, up to the one whose line a node belongs to; None where it begins a line by itself."""
        if self._calls_from_marks and not launch.is_graph:
            return self.calls
        # A trace has marks where Python came to a line: what a call came back to has to be found.
        place = node.loc.file, node.loc.line
        found = [n for n, c in enumerate(self.calls) if (c.node.loc.file, c.node.loc.line) == place]
        return self.calls[: found[-1] + 1] if found else None

    @property
    def _calls_from_marks(self) -> tuple[HistoryStep, ...]:
        """The calls in force that marks have told of."""
        return tuple(c for c in self.calls if c.node.op in (tile.line, tile.pause))

    def end(self, step: HistoryStep, results: Sequence[Any]) -> None:
        """Record the results of a node."""
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

    def close(self) -> HistoryStep:
        """Append a final step for the end of the run."""
        last = self.steps[-1]
        self.steps.append(replace(last, number=last.number + 1, starts=False, changes=[]))
        return self.steps[-1]

    def _forget(self) -> None:
        half = len(self.steps) // 2
        del self.steps[:half]
        self.forgotten += half
        self.size //= 2

    def after(self, step: HistoryStep) -> Iterator[HistoryStep]:
        """The steps after one, in order."""
        return iter(self.steps[step.number - self.forgotten + 1 :])

    def before(self, step: HistoryStep) -> Iterator[HistoryStep]:
        """The steps before one, the latest first."""
        return reversed(self.steps[: max(0, step.number - self.forgotten)])

    def memory(self, memory: InstanceMemory, step: HistoryStep) -> np.ndarray:
        """The contents of a memory before a step."""
        array = memory.array.value if isinstance(memory.array, IntervalArray) else memory.array
        place = array_address(array)
        kept = next((k for k in self.kept.values() if k.low <= place < k.low + k.live.nbytes), None)
        if kept is None or not array.size:
            return array
        held = kept.live.copy()
        for each in reversed(self.steps[max(0, step.number - self.forgotten) :]):
            for change in each.changes:
                if change.memory is kept:
                    held[change.places] = change.before
        return np.ndarray(array.shape, array.dtype, held.view(np.uint8).data, place - kept.low, array.strides)


def instance_value(value: Any, type: Any, place: tuple[int, ...]) -> Any:
    """An instance's part of a value: a block or scalar; `place` is where it stands among those that run."""
    if isinstance(value, AffineScalar):
        return np.int64(value.origin + sum(s * i for s, i in zip(value.steps, place, strict=True)))
    if isinstance(value, IntervalArray):
        return IntervalArray(instance_value(value.value, type, place), instance_value(value.radius, type, place))
    if not place:  # a value of a Graph function, as it is
        return np.asarray(value)
    rank = len(place)
    array = value[tuple(i if n > 1 else 0 for i, n in zip(place, value.shape[:rank], strict=True))]
    return np.broadcast_to(array, tuple(int(n) for n in type.shape)) if isinstance(type, TensorType) else array


def value_before_step(
    history: ExecutionHistory, step: HistoryStep, value: Value, held: Any, place: tuple[int, ...]
) -> Any:
    """What an instance sees of a value or memory when a step is about to run."""
    if not isinstance(held, InstanceMemory):
        return instance_value(held, value.type, place)
    array = history.memory(held, step)
    return array[tuple(i if n > 1 else 0 for i, n in zip(place, array.shape[: held.lead], strict=False))]


def named_values(line: HistoryStep) -> list[tuple[str, Value, Any]]:
    """The variables of the program at a line: name, IR value, and what all instances hold."""
    attrs, node = line.node.attrs, line.node
    if "names" not in attrs:
        return []
    skip = len(node.args) - len(attrs["names"])
    return list(zip(attrs["names"], node.args[skip:], line.args[skip:], strict=True))


def variables_at(
    history: ExecutionHistory, step: HistoryStep, line: HistoryStep, instance: tuple[int, ...]
) -> dict[str, Any]:
    """The variables of a line as one instance holds them at a step; those known while compiling too."""
    found: dict[str, Any] = {name: _literal(text) for name, text in line.node.attrs.get("known", ())}
    # A line that called a function may have run with other instances than the step inside it.
    place = line.place(instance)
    if place is None:
        return found
    if not named_values(line):
        return {**found, **_variables_between_marks(history, step, line, instance)}
    held = {name: value_before_step(history, step, value, held, place) for name, value, held in named_values(line)}
    return _nest_by_dots({**found, **held})


def _variables_between_marks(
    history: ExecutionHistory, step: HistoryStep, line: HistoryStep, instance: tuple[int, ...]
) -> dict[str, Any]:
    """What is known on a line that was not marked: what the marked line around it sees, or a kernel's arguments."""
    around = step.calls[step.calls.index(line) - 1] if line in step.calls[1:] else None
    if around is not None and around is not line:
        return variables_at(history, step, around, instance)
    named = zip(step.launch.function.params, step.launch.args, strict=True)
    return {p.hint or f"argument{i}": a for i, (p, a) in enumerate(named)}


def _nest_by_dots(found: dict[str, Any]) -> dict[str, Any]:
    """Variables by name, those of containers ("layers.0.weight") in containers again."""
    whole: dict[str, Any] = {}
    for name, held in found.items():
        *path, last = [int(part) if part.isdigit() else part for part in name.split(".")]
        place: dict[Any, Any] = whole
        for part in path:
            place = place.setdefault(part, {})
        place[last] = held
    return {name: _as_list_if_indexed(held) for name, held in whole.items()}


def _as_list_if_indexed(held: Any) -> Any:
    """A container whose keys are numbers in order as a list."""
    if not isinstance(held, dict):
        return held
    inner = {key: _as_list_if_indexed(part) for key, part in held.items()}
    return list(inner.values()) if list(inner) == list(range(len(inner))) else inner


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
