"""Models of performance: what a configuration of a kernel takes, predicted from counts or from measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from inspect import signature
from typing import Any

from tessera.errors import ArgumentError, ResourceError, here
from tessera.performance.candidate import Candidate
from tessera.performance.devices import Device, device_of


class PerformanceModel:
    """What predicts how long a kernel takes: override `predict(kernel)` or `predict(kernel, config)`, in seconds.

    `kernel` is a `tessera.performance.candidate.Candidate`: `count_flops()`, `count_memory_bytes()`, `config`, `run()`.

    >>> class Bytes(PerformanceModel):
    ...     def predict(self, kernel):
    ...         return kernel.count_memory_bytes() / 1e12
    """

    def predict(self, kernel: Candidate) -> float:
        """Seconds that a launch takes."""
        raise ArgumentError(f"{type(self).__name__} has no predict", location=here(), expected="predict(kernel)")

    def latency_ms(self, kernel: Candidate) -> float:
        """What `predict` says, in milliseconds; it is given the configuration where it takes one."""
        takes = len(signature(self.predict).parameters)
        given = (kernel,) if takes == 1 else (kernel, kernel.config)
        return float(self.predict(*given)) * 1e3


class RooflineModel(PerformanceModel):
    """The longer of the times that arithmetic and memory take at a device's peaks, stretched where processors idle.

    Counts come from the interpreter, peaks from data sheets ("cpu": measured). Memory counts whole sectors. The
    groups are dealt out to a GPU's multiprocessors in turn: the time is that of the one with the most. Peaks
    are never reached: the model ranks configurations, and is a lower bound of the time of each.

    Formula: S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009.

    Raises:
        ArgumentError: no device of this name is known.
        ResourceError (of `predict`): no group fits the device.
    """

    def __init__(self, device: str | Device = "H100") -> None:
        self.device = device_of(device) if isinstance(device, str) else device
        self.peak_flops = self.device.peak_flops()
        self.peak_bandwidth = self.device.peak_bandwidth()

    def predict(self, kernel: Candidate) -> float:
        flops = self.device.peak_flops(matrix=True) if kernel.multiplies_matrices else self.peak_flops
        least = max(kernel.count_flops() / flops, kernel.count_moved_bytes() / self.peak_bandwidth)
        return least / self._busy(kernel)

    def _busy(self, kernel: Candidate) -> float:
        """The share of the device that has work, on average."""
        report = kernel.report
        fits = self.device.fits(report.threads, report.counts.need.shared_bytes, report.registers)
        if fits is not None and not fits.groups:
            raise ResourceError(
                f"no group of {kernel.owner.name} fits {self.device.name}", expected=f"less {fits.limit}",
                received=str(dict(kernel.config)), suggestion="smaller tiles, or fewer stages",
            )  # fmt: skip
        # Groups that share a multiprocessor share its peak: what counts is how evenly they are dealt out.
        dealt = kernel.groups / self.device.processors
        return dealt / math.ceil(dealt)

    def __repr__(self) -> str:
        return f"RooflineModel({self.device.name})"


class EmpiricalModel(PerformanceModel):
    """Measure once, and interpolate between what was measured: weighted by the distance of configurations.

    A configuration within `reach` (a distance of 1 is a factor of two in one number) of at least two measured ones
    is interpolated; any other is measured, `samples` times.
    """

    def __init__(self, samples: int = 5, reach: float = 1.0) -> None:
        self.samples, self.reach = samples, reach
        self.measurements: dict[tuple[tuple[str, Any], ...], float] = {}

    def measure(self, kernel: Candidate, config: Mapping[str, Any]) -> float:
        """The median of some runs, in seconds; kept."""
        kernel.run(config)  # compiles
        found = statistics.median(kernel.run(config) for _ in range(self.samples)) / 1e3
        self.measurements[tuple(sorted(config.items()))] = found
        return found

    def predict(self, kernel: Candidate, config: Mapping[str, Any]) -> float:  # type: ignore[override]
        key = tuple(sorted(config.items()))
        if key in self.measurements:
            return self.measurements[key]
        near = {k: d for k in self.measurements if (d := _distance(dict(k), config)) <= self.reach}
        if len(near) < 2:
            return self.measure(kernel, config)
        weights = {k: 1 / d for k, d in near.items()}
        logs = sum(w * math.log(self.measurements[k]) for k, w in weights.items())
        return math.exp(logs / sum(weights.values()))

    def __repr__(self) -> str:
        return f"EmpiricalModel(samples={self.samples}, reach={self.reach})"


def _distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """In factors of two for numbers; infinite where anything else differs."""
    if a.keys() != b.keys():
        return math.inf
    parted = [(a[k], b[k]) for k in a if a[k] != b[k]]
    numbers = all(type(x) in (int, float) and x > 0 for pair in parted for x in pair)
    return math.sqrt(sum(math.log2(x / y) ** 2 for x, y in parted)) if numbers else math.inf
