"""Shared-memory carve-out, chosen by measurement: the part of a multiprocessor's L1 cache that is shared memory.

By default the driver chooses it for each kernel, and a multiprocessor that has to change it waits until it is empty.
The largest one for all kernels of a program saves that wait, and leaves kernels that live off the cache less of it.
Which weighs more is measured on the program's own calls: they alternate between CUDA graphs that differ in the
carve-out alone, until each was timed often enough (CUDA C++ Programming Guide, "Shared Memory";
CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tessera.codegen.ptx.runtime.device_memory import StreamEvent

DEFAULT = -1  # the driver chooses for each kernel
CARVEOUTS = (DEFAULT, 100)  # percent of the largest carve-out
ROUNDS = 8  # calls timed with each; the shortest counts
MIN_LAUNCHES = 8  # of a program whose kernels are worth a trial
Run = Callable[[], object]


class ConfigurableKernel(Protocol):
    """A kernel whose carve-out can be chosen."""

    def prefer_carveout(self, percent: int) -> None:
        """Prefer a carve-out in launches from now on."""


class TimedCall:
    """A call between two events of its stream."""

    def __init__(self, run: Run, stream: int) -> None:
        self._first = StreamEvent(stream, timed=True)
        run()
        self._last = StreamEvent(stream, timed=True)

    @property
    def has_ended(self) -> bool:
        """Whether the GPU has done it."""
        return self._last.done()

    @property
    def milliseconds(self) -> float:
        """The time on the GPU, once it has ended."""
        return self._last.measure_since(self._first)


class CarveoutTrial:
    """The calls of a program that were timed with each carve-out; `chosen` is the fastest, once it is known."""

    def __init__(self) -> None:
        self.chosen: int | None = None
        self._calls: dict[int, list[TimedCall]] = {each: [] for each in CARVEOUTS}

    def run_next(self, variants: dict[int, Run], stream: int) -> None:
        """Run the next variant, timed; that of the driver's choice while the last of the timed calls runs."""
        turn = min(CARVEOUTS, key=lambda each: len(self._calls[each]))
        if len(self._calls[turn]) <= ROUNDS:  # the first call of a graph uploads it, and counts for nothing
            self._calls[turn].append(TimedCall(variants[turn], stream))
        elif all(call.has_ended for calls in self._calls.values() for call in calls):
            times = {each: min(call.milliseconds for call in calls[1:]) for each, calls in self._calls.items()}
            self.chosen = min(times, key=lambda each: times[each])
            self._calls.clear()
            variants[self.chosen]()
        else:
            variants[DEFAULT]()


class TrialLaunch:
    """A program with fixed arguments: during the trial a graph for each carve-out, then that of the chosen one.

    `bind` records the launches of the program's `kernels`, with the carve-out that these prefer at that time.
    """

    def __init__(
        self, trial: CarveoutTrial, kernels: Sequence[ConfigurableKernel], bind: Callable[[], Run], stream: int
    ) -> None:
        self._trial, self._kernels, self._bind, self._stream = trial, kernels, bind, stream
        self._run: Run | None = None
        self._variants: dict[int, Run] = {}

    def __call__(self) -> None:
        """Queue the program's kernels."""
        if self._run is not None:
            self._run()
        elif self._trial.chosen is not None:
            self._run = self._variants.get(self._trial.chosen) or self._record(self._trial.chosen)
            self._variants = {}
            self._run()
        else:
            self._variants = self._variants or {each: self._record(each) for each in CARVEOUTS}
            self._trial.run_next(self._variants, self._stream)

    def _record(self, percent: int) -> Run:
        for kernel in self._kernels:
            kernel.prefer_carveout(percent)
        try:
            return self._bind()
        finally:
            for kernel in self._kernels:
                kernel.prefer_carveout(DEFAULT)


def is_worth_a_trial(shared: Sequence[int]) -> bool:
    """Whether kernels with so many bytes of shared memory each may want different carve-outs."""
    return len(shared) >= MIN_LAUNCHES and len(set(shared)) > 1
