"""Observers of the Tile interpreter: what a debugger or a profiler sees of a run, node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from tessera.evaluate import Meaning
from tessera.interp.machine import Machine
from tessera.ir.core import Block, Function, Module
from tessera.ops import checks


@dataclass(frozen=True)
class Started:
    """A launch that begins: its tile function, grid, group size and arguments (arrays for refs, and numbers)."""

    function: Function
    grid: tuple[int, ...]
    group: int
    args: Sequence[Any]


class Observer(Protocol):
    """Something that sees a run."""

    def enter(self, started: Started) -> None:
        """A launch begins."""

    def meaning(self, machine: Machine, inner: Meaning) -> Meaning:
        """The meaning of nodes on this machine, around `inner`: called once for each chunk of a grid."""

    def leave(self) -> None:
        """The launch has ended."""


# The observers of the runs in this context, the innermost first; threads do not see each other's.
OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("tessera_observers", default=())
# What makes an observer of a module that stops somewhere while nobody watches: `tessera.debug` fills this in.
FOR_PAUSES: list[Callable[[], Observer]] = []


def observers_of(module: Module) -> tuple[Observer, ...]:
    """The observers of a run of this module."""
    found = OBSERVERS.get()
    stepped = any(getattr(each, "stops", False) for each in found)
    if not stepped and FOR_PAUSES and any(_pauses(f.body) for f in module.functions[1:]):
        return (*found, FOR_PAUSES[0]())
    return found


@lru_cache(maxsize=1024)
def _pauses(body: Block) -> bool:
    return any(node.op is checks.pause for node in body.walk())
