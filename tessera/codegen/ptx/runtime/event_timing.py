"""Event timing: the seconds of a program on a GPU between two CUDA events of its stream, without copies and calls (CUDA
driver API, "Event Management").
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tessera.codegen.ptx.runtime.driver_api import GPU
    from tessera.codegen.ptx.runtime.gpu_program import GpuProgram

ROUNDS = 7  # the median of so many measurements is taken
SHORTEST = 5e-3  # seconds that the runs between two events should take: an event is exact to about half a microsecond
MOST = 256  # runs between two events
Run = Callable[[], object]


class DeviceClock(Protocol):
    """What measures the time that a device takes for queued work."""

    def measure(self, run: Run) -> float:
        """The seconds that the device takes for what `run` queues."""
        ...


class EventClock:
    """The GPU's own clock: an event before and an event after, on the default stream; the context must be active."""

    def __init__(self, device: GPU) -> None:
        self._make = device.driver.Event

    def measure(self, run: Run) -> float:
        """The seconds between the events around what `run` queues on the default stream."""
        first, last = self._make(), self._make()
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(last.time_since(first)) * 1e-3


def measure_repeated(bind: Callable[[int], Run], clock: DeviceClock, most: int = MOST) -> float:
    """The seconds of one run: the median of `ROUNDS` measurements, each of as many runs as take `SHORTEST` seconds.

    `bind(n)` gives what queues n runs. Two runs come first: one loads the code, one tells how many to take.
    """
    once = bind(1)
    clock.measure(once)
    seconds = clock.measure(once)
    times = int(min(max(math.ceil(SHORTEST / max(seconds, 1e-7)), 1), max(most, 1)))
    run = once if times == 1 else bind(times)
    clock.measure(run)
    return statistics.median(clock.measure(run) for _ in range(ROUNDS)) / times


def measure_alone(prepare: Run, run: Run, check: Run, clock: DeviceClock) -> float:
    """The median seconds of runs that need memory as it was before each, which `prepare` restores and `check` reads.

    The time contains the launch from the host.
    """
    found = []
    for _ in range(1 + ROUNDS):
        prepare()
        found.append(clock.measure(run))
        check()
    return statistics.median(found[1:])


def measure_kernel_times(program: GpuProgram, given: Sequence[Any]) -> list[tuple[str, float]]:
    """The milliseconds of each kernel of a program without loops, in order, by events (`measure_repeated`).

    `given` holds an address (or a number) for each parameter. The launches write the program's arrays.
    """
    found, clock = [], EventClock(program.device)
    with program.device.active():
        for name, run in program.bind_kernels(given):
            found.append((name, 1e3 * measure_repeated(functools.partial(_repeat, run), clock)))
    return found


def _repeat(run: Callable[[], None], times: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(times):
            run()

    return repeated
