"""Which launches are ordered: clocks of streams and the host, and what was touched by launches that nothing orders.

The clocks are vector clocks: a launch comes before another if that one's stream knows of it, through the stream's own
order, through events, or through the host that waited (rule M15 of docs/semantics.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import numpy as np

from tessera.errors import Location, here
from tessera.interp.checked.report import ACTIVE, Checks, Finding
from tessera.interp.checked.shadow import span
from tessera.ir.core import Module
from tessera.kernel.launch import written
from tessera.kernel.streaming import TOUCHED

HOST = 0
Known = dict[int, int]  # of each stream (and the host) how many of its launches are known to come before


@dataclass(frozen=True)
class Touched:
    """A launch's use of an array: where it lies, whether it writes, and when: the how-manieth of which stream.

    The array is kept, so that its memory is not another's while this counts.
    """

    low: int
    high: int
    writes: bool
    stream: int
    time: int
    kernel: str
    array: str
    place: Location
    kept: np.ndarray = field(repr=False)


@dataclass
class Order:
    """What the streams of this process know of each other."""

    known: dict[int, Known] = field(default_factory=lambda: {HOST: {HOST: 0}})
    touched: list[Touched] = field(default_factory=lambda: TOUCHED)
    lock: Any = field(default_factory=RLock)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def stream(self) -> int:
        """The number of a new stream."""
        with self.lock:
            number = next(self.numbers)
            self.known[number] = {number: 0}
            return number

    def snapshot(self, stream: int) -> Known:
        """What a stream knows at this point of its order."""
        with self.lock:
            return dict(self.known[stream])

    def learn(self, stream: int, other: Known) -> None:
        """A stream goes on after what another knew at some point."""
        with self.lock:
            own = self.known[stream]
            for number, time in other.items():
                own[number] = max(own.get(number, 0), time)
            if stream == HOST:  # what the host has waited for comes before all that follows
                self.touched[:] = [t for t in self.touched if own.get(t.stream, 0) < t.time]

    def step(self, stream: int) -> int:
        """One more thing is queued on a stream, after all that the host knows of; its number there."""
        with self.lock:
            self.learn(stream, self.known[HOST])
            self.known[stream][stream] += 1
            return self.known[stream][stream]

    def launch(self, stream: int, module: Module, arrays: Mapping[str, Any]) -> None:
        """A launch joins a stream's order (or the host's); in debug mode those it meets unordered are reported."""
        with self.lock:
            time = 0 if stream == HOST else self.step(stream)
            if (checks := ACTIVE.get()) is None:
                return
            kernel, writes = module.functions[1].name, written(module)
            for place, (name, array) in enumerate(arrays.items()):
                if isinstance(array, np.ndarray) and array.size:
                    new = Touched(*span(array), place in writes, stream, time, kernel, name, here(), array)
                    self._enter(new, checks)

    def _enter(self, new: Touched, checks: Checks) -> None:
        known = self.known[new.stream]
        met = next((t for t in self.touched if self._meet(t, new, known)), None)
        if met is not None:
            checks.found(_finding(met, new))
        if new.stream != HOST:  # the host's own is done when it returns
            self.touched.append(new)

    def _meet(self, old: Touched, new: Touched, known: Known) -> bool:
        overlap = old.low < new.high and new.low < old.high
        return overlap and (old.writes or new.writes) and known.get(old.stream, 0) < old.time


def _finding(old: Touched, new: Touched) -> Finding:
    said = f"{_words(new)} meets {_words(old)}, and nothing orders the two launches"
    advice = "stream.wait(other.record()), or synchronize() before the launch"
    return Finding("stream race", said, new.place, other=old.place, suggestion=advice)


def _words(one: Touched) -> str:
    where = f"on stream {one.stream}" if one.stream != HOST else "on no stream"
    return f"{one.kernel} {where}, which {'writes' if one.writes else 'reads'} `{one.array}`,"


ORDER = Order()
