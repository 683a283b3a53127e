"""Cost models: the run time of a kernel's configuration by roofline (Williams et al. 2009), by interpolation between
measurements, or by ridge regression; and the peaks of devices, from data sheets or measured.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ResourceError, user_location
from tessera.runtime.occupancy import GPUS, Occupancy, estimate_occupancy
from tessera.tools.performance.candidates import Candidate, Features

# Device peaks: of named GPUs from their data sheets, of this machine's processor by measurement.


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


def find_data_sheet(name: str) -> str | None:
    """The short name of a GPU that its driver names: "H200" for "NVIDIA H200"; None where no data sheet is known.

    >>> find_data_sheet("NVIDIA A100-SXM4-80GB"), find_data_sheet("NVIDIA GeForce RTX 4090"), find_data_sheet("B580")
    ('A100', 'RTX4090', None)
    """
    words = name.replace("RTX ", "RTX").replace("-", " ").split()
    return next((word for word in words if word in _DATA_SHEETS), None)


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


# Models of performance: what a configuration of a kernel takes, predicted from counts or from measurements.


class PerformanceModel:
    """What predicts how long a kernel takes: override `predict(kernel)` or `predict(kernel, config)`, in seconds.

    `kernel` is a `tessera.tools.performance.candidates.Candidate`: `count_flops()`, `count_memory_bytes()`, `config`,
    `run()`.

    >>> class Bytes(PerformanceModel):
    ...     def predict(self, kernel):
    ...         return kernel.count_memory_bytes() / 1e12
    """

    def predict(self, kernel: Candidate) -> float:
        """Seconds that a launch takes."""
        raise ArgumentError(
            f"{type(self).__name__} has no predict", location=user_location(), expected="predict(kernel)"
        )

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
        near = {k: d for k in self.measurements if (d := _measure_distance(dict(k), config)) <= self.reach}
        if len(near) < 2:
            return self.measure(kernel, config)
        weights = {k: 1 / d for k, d in near.items()}
        logs = sum(w * math.log(self.measurements[k]) for k, w in weights.items())
        return math.exp(logs / sum(weights.values()))

    def __repr__(self) -> str:
        return f"EmpiricalModel(samples={self.samples}, reach={self.reach})"


def _measure_distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """In factors of two for numbers; infinite where anything else differs."""
    if a.keys() != b.keys():
        return math.inf
    parted = [(a[k], b[k]) for k in a if a[k] != b[k]]
    numbers = all(type(x) in (int, float) and x > 0 for pair in parted for x in pair)
    return math.sqrt(sum(math.log2(x / y) ** 2 for x, y in parted)) if numbers else math.inf


_RIDGE = 1e-3  # keeps the system solvable where fewer configurations were measured than there are terms


@dataclass(frozen=True)
class LatencyPredictions:
    """What a predictor says of configurations: milliseconds for each, all alike before anything was learned."""

    configs: Sequence[Mapping[str, Any]]
    latency_ms: np.ndarray

    def __len__(self) -> int:
        return len(self.configs)


class PerformancePredictor:
    """A model of the logarithm of latency: quadratic in the features, fitted by ridge regression to a history.

    >>> predictor = PerformancePredictor()
    >>> features = Features([{"B": 1}, {"B": 2}, {"B": 4}], np.array([[0.0], [1.0], [2.0]]))
    >>> _ = predictor.predict(features)
    >>> predictor.retrain([({"B": 1}, 4.0), ({"B": 2}, 2.0), ({"B": 4}, 1.0)])
    >>> predictor.top_k_configs(predictor.predict(features), k=1)
    [{'B': 4}]
    """

    def __init__(self) -> None:
        self._rows: dict[Any, np.ndarray] = {}
        self._weights: np.ndarray | None = None

    def predict(self, features: Features) -> LatencyPredictions:
        """A latency for each configuration; its features are remembered for `retrain`."""
        rows = [_expand_quadratic(row) for row in features.rows]
        self._rows.update({_make_key(c): r for c, r in zip(features.configs, rows, strict=True)})
        if self._weights is None or len(self._weights) != len(rows[0]):
            return LatencyPredictions(features.configs, np.ones(len(rows)))
        return LatencyPredictions(features.configs, np.exp(np.array(rows) @ self._weights))

    def top_k_configs(self, predictions: LatencyPredictions, k: int = 10) -> list[Mapping[str, Any]]:
        """The k configurations that are predicted to be the fastest; of two alike the first given."""
        order = np.argsort(predictions.latency_ms, kind="stable")[:k]
        return [predictions.configs[int(i)] for i in order]

    def retrain(self, history: Iterable[tuple[Mapping[str, Any], float]]) -> None:
        """Fit to (configuration, milliseconds); configurations that could not run (infinity) are left out.

        Raises:
            ArgumentError: a configuration's features were never shown to `predict`.
        """
        ran = [(config, ms) for config, ms in history if math.isfinite(ms) and ms > 0]
        unknown = [config for config, _ in ran if _make_key(config) not in self._rows]
        if unknown:
            raise ArgumentError(
                f"the features of {dict(unknown[0])} are not known", location=user_location(),
                suggestion="predictor.predict(features) shows them",
            )  # fmt: skip
        if not ran:
            return
        rows = np.array([self._rows[_make_key(config)] for config, _ in ran])
        penalty = _RIDGE * np.eye(rows.shape[1])
        penalty[0, 0] = 0  # the mean is free
        self._weights = np.linalg.lstsq(rows.T @ rows + penalty, rows.T @ np.log([ms for _, ms in ran]), rcond=None)[0]


def _expand_quadratic(row: np.ndarray) -> np.ndarray:
    """A constant, the features, and their products in pairs."""
    pairs = np.outer(row, row)[np.triu_indices(len(row))]
    return np.concatenate([[1.0], row, pairs])


def _make_key(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, repr(v)) for k, v in config.items()))
