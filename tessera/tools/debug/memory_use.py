"""`memory` and `memory_report`: what was allocated in a function, what is still held after it, and by which lines."""

from __future__ import annotations

import sysconfig
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tessera.core.errors import ArgumentError
from tessera.interp.observers import OBSERVERS, ObservedLaunch
from tessera.interp.tile.machine import TileMachine
from tessera.ir.builder import NodeSemantics
from tessera.ops.dialects import tile
from tessera.tools.debug.sessions import ContextDecorator

F = TypeVar("F", bound=Callable[..., Any])
_MAX_REPORTED_LINES = 10
_FRAMES = 32  # of a call stack that are kept for each allocation
# Where libraries lie: this package, Python's own and those installed.
_LIBRARIES = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")


@dataclass(frozen=True)
class HeldAllocation:
    """Memory that a line allocated and that is still held."""

    place: str
    bytes: int
    count: int

    def __str__(self) -> str:
        return f"{self.place}: {self.bytes} bytes in {self.count} allocation{'s' * (self.count != 1)}"


@dataclass
class MemoryReport:
    """What Python's allocator saw (NumPy's arrays and Tensors too), and the buffers of interpreted kernels by space.

    `peak` and `held` are bytes above what was there before; `sources` are the lines that still hold most.
    """

    peak: int = 0
    held: int = 0
    sources: list[HeldAllocation] = field(default_factory=list)
    buffers: Counter[str] = field(default_factory=Counter)
    _before: tuple[tracemalloc.Snapshot, int] | None = None

    def begin(self) -> None:
        """Take what is there now as the beginning."""
        tracemalloc.reset_peak()
        self._before = tracemalloc.take_snapshot(), tracemalloc.get_traced_memory()[0]

    def measure(self) -> None:
        """Fill in what has been allocated since the beginning."""
        if self._before is not None and tracemalloc.is_tracing():
            before, base = self._before
            now, peak = tracemalloc.get_traced_memory()
            self.peak, self.held = max(0, peak - base), max(0, now - base)
            self.sources = _sources(tracemalloc.take_snapshot(), before)

    def end(self) -> None:
        """Measure, and look no further."""
        self.measure()
        self._before = None

    def __str__(self) -> str:
        spaces = ", ".join(f"{n} bytes {space}" for space, n in sorted(self.buffers.items())) or "none"
        lines = [f"peak {self.peak} bytes, still held {self.held}", f"kernel buffers of one group: {spaces}"]
        return "\n".join([*lines, *(f"  {number + 1}. {each}" for number, each in enumerate(self.sources))])

    # An observer of kernels: their buffers.
    def enter(self, started: ObservedLaunch) -> None:
        """A launch begins."""
        own: Counter[str] = Counter()
        for node in started.function.body.walk():
            if node.op is tile.alloc:
                shape, dtype = node.attrs["shape"], node.attrs["dtype"]
                size = dtype.numpy.itemsize
                for n in shape:
                    size *= int(n)
                own[node.attrs["space"]] += size
        self.buffers = self.buffers | own  # the largest of any launch

    def leave(self) -> None:
        """The launch has ended."""

    def meaning(self, machine: TileMachine, inner: NodeSemantics) -> NodeSemantics:
        """Nodes as they are."""
        return inner


_LAST: list[MemoryReport] = []


@contextmanager
def track_memory() -> Iterator[MemoryReport]:
    """Follow the memory that is allocated in this block; the report is whole when the block has ended."""
    report = MemoryReport()
    _LAST[:] = [report]
    began = not tracemalloc.is_tracing()
    if began:
        tracemalloc.start(_FRAMES)
    report.begin()
    token = OBSERVERS.set((report, *OBSERVERS.get()))
    try:
        yield report
    finally:
        OBSERVERS.reset(token)
        report.end()
        if began:
            tracemalloc.stop()


def _sources(after: tracemalloc.Snapshot, before: tracemalloc.Snapshot) -> list[HeldAllocation]:
    """The lines of user code (the innermost outside libraries) that hold more than before, the greediest first."""
    size: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for each in after.compare_to(before, "traceback"):
        place = _innermost_user_frame(each.traceback)
        if place is not None:
            size[place] += each.size_diff
            count[place] += each.count_diff
    return [
        HeldAllocation(place, n, count[place])
        for place, n in size.most_common(_MAX_REPORTED_LINES)
        if n > 0 and count[place] > 0
    ]


def _innermost_user_frame(frames: tracemalloc.Traceback) -> str | None:
    """The innermost frame that is in no library; None where there is none."""
    found = (f for f in reversed(frames) if not f.filename.startswith(_LIBRARIES))
    return next((f"{f.filename}:{f.lineno}" for f in found), None)


def memory(function: F) -> F:
    """A function or kernel whose allocations are followed at each call; `memory_report()` tells of the last one.

    >>> import numpy as np, tessera as ts
    >>> kept = []
    >>> @ts.debug.memory
    ... def leaks():
    ...     kept.append(np.zeros(1 << 16, np.float64))
    >>> leaks()
    >>> ts.debug.memory_report(show=False).held >= 1 << 19
    True
    """
    return ContextDecorator(function, lambda called: track_memory())  # type: ignore[return-value]


def memory_report(show: bool = True) -> MemoryReport:
    """What the last function under `ts.debug.memory` allocated: printed, unless `show` is false, and given.

    Inside such a function it tells of the call so far.

    Raises:
        ArgumentError: nothing has been followed.
    """
    if not _LAST:
        raise ArgumentError("no function's memory has been followed", suggestion="put @ts.debug.memory above it")
    _LAST[0].measure()
    if show:
        print(_LAST[0])
    return _LAST[0]
