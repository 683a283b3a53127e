"""Provenance of values: the load mask, the source of a NaN or infinity, and the error bound by replay in bound mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.errors import ArgumentError, UnknownNameError
from tessera.core.types import TensorType
from tessera.interp import bound as graph_bound
from tessera.interp.observers import ObservedLaunch
from tessera.interp.sanitizer.monitor import Monitor
from tessera.interp.tile import interpreter
from tessera.interp.tile.affine import AffineScalar
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import InstanceMemory
from tessera.ir.builder import NodeSemantics
from tessera.ir.numerics.interval_arithmetic import IntervalArray
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, shape
from tessera.tools.debug import formatting
from tessera.tools.debug.history import ExecutionHistory, HistoryStep, instance_value, named_values, value_before_step

if TYPE_CHECKING:
    from tessera.tools.debug.console import Console


_READS, _WRITES = (tile.load, tile.gather), (tile.store, tile.scatter)


def trace_back(history: ExecutionHistory, step: HistoryStep, held: Any, instance: tuple[int, ...]) -> Iterator[str]:
    """The way of a value that is not finite, the latest op first; `held` is what all instances hold."""
    while True:
        made = next((s for s in history.before(step) if any(r is held for r in s.results)), None)
        if made is None:
            yield "it was there before, or was joined of several ways through a branch or loop"
            return
        place = made.place(instance)
        where = f"{formatting.format_location(made.node.loc)}: {made.node.op.name}"
        if place is None:
            yield f"{where}, in other programs alone"
            return
        said, found = _find_source(history, made, place, instance)
        yield where + said
        if found is None:
            return
        step, held = found


def _find_source(
    history: ExecutionHistory, made: HistoryStep, place: tuple[int, ...], instance: tuple[int, ...]
) -> tuple[str, tuple[HistoryStep, Any] | None]:
    """What to say of an op whose result is not finite, and where that came from: a step, and a value before it."""
    if made.node.op in _READS:
        found = _find_store(history, made, instance)
        name = made.args[0].name
        return (f": it came in with {name}", None) if found is None else (f" of {name}", found)
    guilty = [a for v, a in zip(made.node.args, made.args, strict=True) if _is_not_finite(v.type, a, place)]
    return ("", (made, guilty[0])) if guilty else (f" makes it of {_format_operands(made, place)}", None)


def _is_not_finite(type: Any, held: Any, place: tuple[int, ...]) -> bool:
    """Whether an instance's part of a float value is not all finite."""
    if isinstance(held, (InstanceMemory, AffineScalar)) or not isinstance(type, TensorType) or not type.dtype.is_float:
        return False
    return not np.isfinite(np.asarray(instance_value(held, type, place)).astype(np.float64)).all()


def _format_operands(made: HistoryStep, place: tuple[int, ...]) -> str:
    """The operands in words."""
    shown = []
    for value, held in zip(made.node.args, made.args, strict=True):
        array = np.asarray(instance_value(held, value.type, place))
        shown.append(str(array) if not array.ndim else f"a block ({formatting.format_statistics(array)})")
    return ", ".join(shown)


def _find_store(
    history: ExecutionHistory, read: HistoryStep, instance: tuple[int, ...]
) -> tuple[HistoryStep, Any] | None:
    """The last store to the memory that a step reads of something not finite, and what it stored."""
    memory = read.args[0].array
    for step in history.before(read):
        if step.node.op in _WRITES and np.may_share_memory(step.args[0].array, memory):
            place = step.place(instance)
            if place is not None and _is_not_finite(step.node.args[1].type, step.args[1], place):
                return step, step.args[1]
    return None


# Ops that pass their operand through: the load mask of the result is that of the operand.
_TRANSPARENT_OPS = (shape.reshape, shape.permute, basic.broadcast_to, basic.cast)


def describe_load_mask(history: ExecutionHistory, step: HistoryStep, held: Any) -> str | None:
    """The mask under which a value was loaded, in words; None where it was not loaded under one."""
    for before in history.before(step):
        if any(each is held for each in before.results):
            if before.node.op in _TRANSPARENT_OPS:
                held = before.args[0]
                continue
            found = formatting.format_mask(before)
            return found and f"loaded at line {before.node.loc.line}; {found}"
    return None


def operand_of_instance(console: Console, value: Any, held: Any, place: tuple[int, ...]) -> Any:
    """An operand as the instance shown sees it."""
    return value_before_step(console.stepper.history, console.step, value, held, place)


class _ReplayStopped(Exception):
    """The replay has come to the step that it was for."""


class _ReplayObserver:
    """An observer that counts nodes up to the wanted one and keeps its operands."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.args: Sequence[Any] = ()

    def enter(self, started: ObservedLaunch) -> None:
        """A launch begins."""

    def leave(self) -> None:
        """The launch has ended."""

    def meaning(self, machine: TileMachine, inner: NodeSemantics) -> NodeSemantics:
        """Nodes as they are, counted."""

        def mean(node: Any, args: list[Any], walk: Any) -> Sequence[Any]:
            if not self.left:
                self.args = args
                raise _ReplayStopped()
            self.left -= 1
            return inner(node, args, walk)

        return mean


def show_bound(console: Console, name: str) -> IntervalArray:
    """A variable of the line that is looked at, for the instance shown, with its rigorous bound.

    Raises:
        UnknownNameError: there is no such variable. ArgumentError: it is memory, or the launch's inputs are unknown.
    """
    line = console.line
    names = [n for n, _, _ in named_values(line)]
    if name not in names:
        problem = f"`{name}` is no variable here" if name else "a variable is missing"
        raise UnknownNameError(problem, expected=", ".join(names) or "a variable of the kernel")
    if line.launch.is_graph:
        return _show_graph_bound(console, line, names.index(name))
    started, arrays = console.stepper.history.began[id(line.launch)]
    watcher = _ReplayObserver(line.number - started)
    lifted = [IntervalArray(a.copy()) if isinstance(a, np.ndarray) else a for a in arrays]
    launch = line.launch
    try:
        interpreter.launch(launch.function, launch.grid, lifted, True, Monitor(None, (), (watcher,)))
    except _ReplayStopped:
        pass
    place = line.place(console.stepper.instance)
    skip = len(line.node.args) - len(names)
    held, value = watcher.args[skip + names.index(name)], line.node.args[skip + names.index(name)]
    if isinstance(held, InstanceMemory) or place is None:
        raise ArgumentError(f"`{name}` is memory", suggestion="load a part of it into a variable, and ask for that")
    found = value_before_step(console.stepper.history, line, value, held, place)
    return found if isinstance(found, IntervalArray) else IntervalArray(np.asarray(found))


# What is told of each mark that bound mode passes in a Graph function.
_MARKS: ContextVar[Callable[[Sequence[Any]], None]] = ContextVar("marks", default=lambda args: None)


@graph_bound.bound_control_flow_rules(tile.line, tile.pause)
def _(node, args, run):
    _MARKS.get()(args)
    return ()


def _show_graph_bound(console: Console, line: HistoryStep, number: int) -> IntervalArray:
    """A variable at a mark: composites have other ops there, but as many marks come before it."""
    history = console.stepper.history
    started, arrays = history.began[id(line.launch)]
    if line.node.op not in (tile.line, tile.pause) or started < history.forgotten:
        raise ArgumentError("this line cannot be found again", suggestion="ask on a line of the function itself")
    mine = history.steps[started - history.forgotten : line.number - history.forgotten]
    left = sum(1 for s in mine if s.launch is line.launch and s.node.op in (tile.line, tile.pause))
    seen: list[Any] = []

    def passed(args: Sequence[Any]) -> None:
        seen.append(None)
        if len(seen) > left:
            seen.append(args[len(args) - len(named_values(line)) + number])
            raise _ReplayStopped()

    token = _MARKS.set(passed)
    try:
        graph_bound.run(line.launch.function, arrays)
    except _ReplayStopped:
        pass
    finally:
        _MARKS.reset(token)
    found = seen[-1]
    return found if isinstance(found, IntervalArray) else IntervalArray(np.asarray(found))
