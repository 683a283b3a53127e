"""Where a value came from: the mask it was loaded under, and its bound, by running the launch again in bound mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.debug import show
from tessera.debug.history import History, Step
from tessera.debug.values import at, names_of
from tessera.errors import ArgumentError, UnknownNameError
from tessera.evaluate import Meaning
from tessera.interp import bound as graph_bound
from tessera.interp import tile as interpreter
from tessera.interp.checked.monitor import Monitor
from tessera.interp.checked.observe import Started
from tessera.interp.machine import Machine
from tessera.interp.memory import Memory
from tessera.numerics.bounded import Bounded
from tessera.ops import basic, checks, shape

if TYPE_CHECKING:
    from tessera.debug.console import Console

# Ops that hand on what they take: a value behind one of them was loaded before it.
_THROUGH = (shape.reshape, shape.permute, basic.broadcast_to, basic.cast)


def mask_of(history: History, step: Step, held: Any) -> str | None:
    """The mask under which a value was loaded, in words; None where it was not loaded under one."""
    for before in history.before(step):
        if any(each is held for each in before.results):
            if before.node.op in _THROUGH:
                held = before.args[0]
                continue
            found = show.mask(before)
            return found and f"loaded at line {before.node.loc.line}; {found}"
    return None


def seen(console: Console, value: Any, held: Any, place: tuple[int, ...]) -> Any:
    """An operand as the instance shown sees it."""
    return at(console.stepper.history, console.step, value, held, place)


class _Found(Exception):
    """The replay has come to the step that it was for."""


class _Replay:
    """An observer that counts nodes up to the wanted one and keeps its operands."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.args: Sequence[Any] = ()

    def enter(self, started: Started) -> None:
        """A launch begins."""

    def leave(self) -> None:
        """The launch has ended."""

    def meaning(self, machine: Machine, inner: Meaning) -> Meaning:
        """Nodes as they are, counted."""

        def mean(node: Any, args: list[Any], walk: Any) -> Sequence[Any]:
            if not self.left:
                self.args = args
                raise _Found()
            self.left -= 1
            return inner(node, args, walk)

        return mean


def bound(console: Console, name: str) -> Bounded:
    """A variable of the line that is looked at, for the instance shown, with its rigorous bound.

    Raises:
        UnknownNameError: there is no such variable. ArgumentError: it is memory, or the launch's inputs are unknown.
    """
    line = console.line
    names = [n for n, _, _ in names_of(line)]
    if name not in names:
        raise UnknownNameError(f"`{name}` is no variable here", expected=", ".join(names) or "a variable of the kernel")
    if line.launch.is_graph:
        return _graph_bound(console, line, names.index(name))
    started, arrays = console.stepper.history.began[id(line.launch)]
    watcher = _Replay(line.number - started)
    lifted = [Bounded(a.copy()) if isinstance(a, np.ndarray) else a for a in arrays]
    launch = line.launch
    try:
        interpreter.launch(launch.function, launch.grid, lifted, True, Monitor(None, (), (watcher,)))
    except _Found:
        pass
    place = line.place(console.stepper.instance)
    skip = len(line.node.args) - len(names)
    held, value = watcher.args[skip + names.index(name)], line.node.args[skip + names.index(name)]
    if isinstance(held, Memory) or place is None:
        raise ArgumentError(f"`{name}` is memory", suggestion="load a part of it into a variable, and ask for that")
    found = at(console.stepper.history, line, value, held, place)
    return found if isinstance(found, Bounded) else Bounded(np.asarray(found))


# What is told of each mark that bound mode passes in a Graph function.
_MARKS: ContextVar[Callable[[Sequence[Any]], None]] = ContextVar("marks", default=lambda args: None)


@graph_bound.flow(checks.line, checks.pause)
def _(node, args, run):
    _MARKS.get()(args)
    return ()


def _graph_bound(console: Console, line: Step, number: int) -> Bounded:
    """A variable at a mark: composites have other ops there, but as many marks come before it."""
    history = console.stepper.history
    started, arrays = history.began[id(line.launch)]
    if line.node.op not in (checks.line, checks.pause) or started < history.forgotten:
        raise ArgumentError("this line cannot be found again", suggestion="ask on a line of the function itself")
    mine = history.steps[started - history.forgotten : line.number - history.forgotten]
    left = sum(1 for s in mine if s.launch is line.launch and s.node.op in (checks.line, checks.pause))
    seen: list[Any] = []

    def passed(args: Sequence[Any]) -> None:
        seen.append(None)
        if len(seen) > left:
            seen.append(args[len(args) - len(names_of(line)) + number])
            raise _Found()

    token = _MARKS.set(passed)
    try:
        graph_bound.run(line.launch.function, arrays)
    except _Found:
        pass
    finally:
        _MARKS.reset(token)
    found = seen[-1]
    return found if isinstance(found, Bounded) else Bounded(np.asarray(found))
