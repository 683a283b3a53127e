"""How long each kernel of a program takes on the GPU, by events around it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.codegen.ptx.host.runtime import Program


def kernel_times(program: Program, given: Sequence[Any], rounds: int = 5, each: int = 20) -> list[tuple[str, float]]:
    """The kernels of a program without loops, in order, each with its milliseconds: the median of `rounds`.

    `given` holds an address (or a number) for each parameter. A kernel is queued `each` times between two events, so
    that its time does not hide in that of a launch; what it writes is as if the program had run.
    """
    drv = program.device.driver
    found = []
    with program.device.active():
        for name, run in program.kernels(given):
            times = []
            for _ in range(rounds):
                first, last = drv.Event(), drv.Event()
                first.record()
                for _ in range(each):
                    run()
                last.record()
                last.synchronize()
                times.append(last.time_since(first) / each)
            found.append((name, statistics.median(times)))
    return found
