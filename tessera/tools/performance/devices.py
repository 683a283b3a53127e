"""Device peaks: of named GPUs from their data sheets, of this machine's processor by measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.tools.debug.occupancy import GPUS, Occupancy, estimate_occupancy

HOST = "cpu"
_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Device:
    """A device as models of performance see it; rates are per second.

    `processors` run groups of threads side by side. `matrix` is the peak of matrix units on 16-bit floats with
    f32 sums, dense.
    """

    name: str
    flops: float
    matrix: float
    bandwidth: float
    processors: int

    def peak_flops(self, matrix: bool = False) -> float:
        """Floating-point operations a second: of f32, or of 16-bit products on matrix units."""
        return self.matrix if matrix else self.flops

    def peak_bandwidth(self) -> float:
        """Bytes a second that global memory gives."""
        return self.bandwidth

    def fits(self, threads: int, shared: int, registers: int) -> Occupancy | None:
        """How many groups a multiprocessor holds at once, by a model; None for what is no GPU."""
        return estimate_occupancy(self.name, threads, shared, registers) if self.name in GPUS else None


# NVIDIA's data sheets of the SXM (or only) form: f32 Tflop/s, 16-bit Tflop/s of tensor cores, GB/s.
_DATA_SHEETS = {
    "V100": (15.7, 125, 900), "T4": (8.1, 65, 320), "A100": (19.5, 312, 2039), "A10": (31.2, 125, 600),
    "RTX3090": (35.6, 71, 936), "L4": (30.3, 121, 300), "RTX4090": (82.6, 165, 1008),
    "H100": (67, 989, 3350), "H200": (67, 989, 4800), "B200": (80, 2250, 8000),
}  # fmt: skip


def device_of(name: str) -> Device:
    """A device by its name: a GPU such as "H100", or "cpu", whose peaks are measured once.

    Raises:
        ArgumentError: no device of this name is known.

    >>> device_of("A100").peak_flops() / device_of("A100").peak_bandwidth() > 9
    True
    """
    if name == HOST:
        return _measure_host()
    if name not in _DATA_SHEETS:
        raise ArgumentError(
            f"the peaks of {name} are not known", location=user_location(), expected=", ".join([HOST, *_DATA_SHEETS])
        )
    flops, matrix, bandwidth = _DATA_SHEETS[name]
    return Device(name, flops * _TERA, matrix * _TERA, bandwidth * _GIGA, GPUS[name].processors)


@cache
def _measure_host() -> Device:
    """This machine: NumPy's product of matrices, and a copy of memory that no cache holds."""
    a = np.ones((512, 512), np.float32)
    source, target = np.ones(1 << 24, np.uint8), np.empty(1 << 24, np.uint8)
    flops = 2 * 512**3 / _find_min_time(lambda: a @ a)
    return Device(
        HOST, flops, flops, 2 * source.nbytes / _find_min_time(lambda: np.copyto(target, source)), os.cpu_count() or 1
    )


def _find_min_time(run: Callable[[], object]) -> float:
    times = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
