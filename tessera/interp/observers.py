"""Observers of interpreter runs: what a debugger or a profiler sees, node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from tessera.core.progress import is_progress_shown, operation, report_progress
from tessera.interp.tile.machine import TileMachine
from tessera.ir.builder import NodeSemantics
from tessera.ir.core import Block, Function, Module, Node
from tessera.ops.dialects import tile


@dataclass(frozen=True)
class ObservedLaunch:
    """A launch that begins: its tile function, grid, group size and arguments (arrays for refs, and numbers).

    A Graph function is a launch without a grid, whose arguments are its operands.
    """

    function: Function
    grid: tuple[int, ...]
    group: int
    args: Sequence[Any]

    @property
    def is_graph(self) -> bool:
        """Whether this is a Graph function, not a launch over a grid."""
        return not self.grid


class Observer(Protocol):
    """An observer of runs."""

    def enter(self, started: ObservedLaunch) -> None:
        """A launch begins."""

    def meaning(self, machine: TileMachine, inner: NodeSemantics) -> NodeSemantics:
        """Wrap the semantics of nodes on this machine; called once for each chunk of a grid."""

    def leave(self) -> None:
        """The launch has ended."""


# The observers of the runs in this context, the innermost first; threads do not see each other's.
OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("tessera_observers", default=())
# Makes the observer of a module with breakpoints outside a debugger session; `tessera.tools.debug` registers it.
PAUSE_OBSERVERS: list[Callable[[], Observer]] = []


def find_observers(module: Module) -> tuple[Observer, ...]:
    """The observers of a run of this module."""
    return _add_pause_observers(OBSERVERS.get(), [f.body for f in module.functions[1:]])


def _add_pause_observers(found: tuple[Observer, ...], bodies: Sequence[Block]) -> tuple[Observer, ...]:
    stepped = any(getattr(each, "stops", False) for each in found)
    if not stepped and PAUSE_OBSERVERS and any(_has_pause(body) for body in bodies):
        return (*found, PAUSE_OBSERVERS[0]())
    return found


def is_observed(body: Block) -> bool:
    """Whether a Graph function has observers or breakpoints."""
    return bool(OBSERVERS.get()) or _has_pause(body)


@contextmanager
def observe_graph(meaning: NodeSemantics, function: Function, arrays: Sequence[Any]) -> Iterator[NodeSemantics]:
    """Wrap the semantics of a Graph function's nodes for its observers: one program, without instance axes."""
    every = _add_pause_observers(OBSERVERS.get(), [function.body])
    found = [each for each in every if getattr(each, "stops", False)]
    for observer in found:
        observer.enter(ObservedLaunch(function, (), 1, arrays))
        meaning = observer.meaning(TileMachine((), 1, (), ()), meaning)
    yield meaning
    for observer in found:
        observer.leave()


@lru_cache(maxsize=1024)
def _has_pause(body: Block) -> bool:
    return any(node.op is tile.pause for node in body.walk())


@contextmanager
def report_ops(meaning: NodeSemantics, body: Block, name: str) -> Iterator[NodeSemantics]:
    """The same semantics of nodes, which reports as progress how many of a body's own nodes have run."""
    if not is_progress_shown():
        yield meaning
        return
    places = {id(node): number for number, node in enumerate(body.nodes)}

    def mean(node: Node, args: list[Any], walk: Any) -> Any:
        if id(node) in places:
            report_progress(name, places[id(node)], len(places))
        return meaning(node, args, walk)

    with operation(name):
        yield mean
