"""Shared-memory carve-out, chosen by measurement: the part of a multiprocessor's L1 cache that is shared memory.

By default the driver chooses it for each kernel, and a multiprocessor that has to change it waits until it is empty.
The largest one for all kernels of a program saves that wait, and leaves kernels that live off the cache less of it.
Which weighs more is measured on the program's own calls: they alternate between CUDA graphs that differ in the
carve-out alone, until each was timed often enough (CUDA C++ Programming Guide, "Shared Memory";
CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

from tessera.codegen.ptx.runtime.device_memory import NOT_READY
from tessera.codegen.ptx.runtime.driver_api import find_driver_call

DEFAULT = -1  # the driver chooses for each kernel
CARVEOUTS = (DEFAULT, 100)  # percent of the largest carve-out
ROUNDS = 8  # calls timed with each; the shortest counts
MIN_LAUNCHES = 8  # of a program whose kernels are worth a trial
WITH_TIMING = 0  # flags of cuEventCreate
Run = Callable[[], object]


class TimedCall:
    """A call between two events of its stream, which tell its milliseconds once it has ended."""

    def __init__(self, run: Run, stream: int) -> None:
        self._events = ctypes.c_void_p(), ctypes.c_void_p()
        self._stream = ctypes.c_void_p(stream)
        self._failed = any([find_driver_call("cuEventCreate")(ctypes.byref(e), WITH_TIMING) for e in self._events])
        self._record(0)
        run()
        self._record(1)

    def _record(self, which: int) -> None:
        self._failed = self._failed or bool(find_driver_call("cuEventRecord")(self._events[which], self._stream))

    @property
    def has_ended(self) -> bool:
        """Whether the GPU has done it."""
        return self._failed or find_driver_call("cuEventQuery")(self._events[1]) != NOT_READY

    @property
    def milliseconds(self) -> float:
        """The time on the GPU once it has ended; infinite where events tell nothing (a stream under capture)."""
        found = ctypes.c_float()
        failed = self._failed or find_driver_call("cuEventElapsedTime")(ctypes.byref(found), *self._events)
        return math.inf if failed else found.value

    def __del__(self) -> None:
        for event in self._events:
            if event:
                find_driver_call("cuEventDestroy_v2")(event)


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
    """A program with fixed arguments: during the trial a graph for each carve-out, then that of the chosen one."""

    def __init__(self, trial: CarveoutTrial, record: Callable[[int], Run], stream: int) -> None:
        self._trial, self._record, self._stream = trial, record, stream
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


def is_worth_a_trial(shared: Sequence[int]) -> bool:
    """Whether kernels with so many bytes of shared memory each may want different carve-outs."""
    return len(shared) >= MIN_LAUNCHES and len(set(shared)) > 1
