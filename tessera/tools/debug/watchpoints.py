"""`watch`: statistics of named variables whenever they change, in functions and in the kernels they launch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np

from tessera.frontend.kernel.python_ast import scope
from tessera.interp.observers import OBSERVERS, ObservedLaunch
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import InstanceMemory
from tessera.ir.builder import NodeSemantics
from tessera.ir.core import Node
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import tile
from tessera.tools.debug import formatting
from tessera.tools.debug.sessions import ContextDecorator

# A warning is given where a value is this large, unless `limit` says otherwise.
MAGNITUDE_LIMIT = 1e4


@dataclass(frozen=True)
class WatchedChange:
    """A watched variable with a new value: where, its statistics in words, and what is alarming about it, if any."""

    name: str
    place: str
    stats: str
    warning: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.name}: {self.stats}" + (f"  WARNING: {self.warning}" if self.warning else "")


@dataclass
class Watch:
    """What watched variables held, in order; `write` gets each line as it comes."""

    names: Sequence[str]
    limit: float
    write: Callable[[str], Any]
    seen: list[WatchedChange] = field(default_factory=list)
    _last: dict[tuple[str, str], Any] = field(default_factory=dict)

    def note(self, name: str, scope: str, place: str, held: Any) -> None:
        """Look at a variable; nothing happens unless it holds something new."""
        if name not in self.names or self._last.get((scope, name)) is held:
            return
        self._last[scope, name] = held
        array = _array(held)
        if array is None:
            return
        found = WatchedChange(name, place, formatting.format_statistics(array), self._warning(array))
        self.seen.append(found)
        self.write(str(found))

    def _warning(self, array: np.ndarray) -> str:
        if array.dtype.kind in "bO" or not array.size:
            return ""
        wide = array.astype(np.float64)
        if not np.isfinite(wide).all():
            return "not all elements are finite"
        largest = float(np.abs(wide).max())
        return f"a magnitude of {largest:.6g} (limit {self.limit:g})" if largest > self.limit else ""

    # An observer of kernels: the marks before each line hold the variables.
    def enter(self, started: ObservedLaunch) -> None:
        """A launch begins."""

    def leave(self) -> None:
        """The launch has ended."""

    def meaning(self, machine: TileMachine, inner: NodeSemantics) -> NodeSemantics:
        """Nodes as they are, with a look at the variables before each line."""

        def mean(node: Node, args: list[Any], walk: Any) -> Sequence[Any]:
            if node.op is tile.line:
                for name, held in zip(node.attrs["names"], args, strict=True):
                    if not isinstance(held, InstanceMemory):
                        array = machine.arrays([held])[0] if name in self.names else held
                        self.note(
                            name, node.attrs["function"], f"{node.loc.file}:{node.loc.line}", _cache_array(held, array)
                        )
            return inner(node, args, walk)

        return mean


def _cache_array(held: Any, array: Any) -> Any:
    """The array of an affine value is made anew each time: what stays the same is the value."""
    return held if array is held else array if not hasattr(held, "origin") else np.asarray(array)


def _array(held: Any) -> np.ndarray | None:
    if isinstance(held, Tensor):
        return None if held.is_traced else np.asarray(held.data)
    return np.asarray(held) if isinstance(held, (np.ndarray, np.generic, int, float)) else None


def watch(*names: str, limit: float = MAGNITUDE_LIMIT, write: Callable[[str], Any] = print) -> Callable[[Any], Any]:
    """Decorate a function: whenever one of these variables changes in it, its statistics are written.

    Kernels that it launches are watched too (for all their programs together). A NaN, an infinity or a magnitude above
    `limit` adds a warning. What was seen is kept in the function's `watch.seen`.

    >>> import numpy as np, tessera as ts
    >>> @ts.debug.watch("total", write=lambda line: None)
    ... def training(x):
    ...     total = x.sum()
    ...     total = total * 1e6
    ...     return total
    >>> _ = training(np.ones(4))
    >>> [seen.warning for seen in training.watch.seen]
    ['', 'a magnitude of 4e+06 (limit 10000)']
    """

    def decorate(function: Any) -> Any:
        found = Watch(names, limit, write)
        watched = ContextDecorator(function, lambda called: _install_watch(found, getattr(called, "__code__", None)))
        watched.watch = found  # type: ignore[attr-defined]
        return watched

    return decorate


@contextmanager
def _install_watch(found: Watch, code: Any) -> Iterator[None]:
    token = OBSERVERS.set((found, *OBSERVERS.get()))
    before = sys.gettrace()
    sys.settrace(_tracer(found, code))
    try:
        with scope.compile_with_marks():
            yield
    finally:
        sys.settrace(before)
        OBSERVERS.reset(token)


def _tracer(found: Watch, code: Any) -> Any:
    """A trace function that looks at the variables of one function's calls, line by line."""

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "return"):
            for name in found.names:
                if name in frame.f_locals:
                    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    found.note(name, frame.f_code.co_name, place, frame.f_locals[name])
        return local

    return lambda frame, event, arg: local if frame.f_code is code else None
