"""Warm starts of tuning: a model that learns from the measurements of other shapes which configurations to try first.

The model is the roofline times a factor that is learned by ridge regression on the logarithms of the configuration, of
the sizes and of the counts (analytic and learned, as in AutoTVM, Chen et al., NeurIPS 2018). Its error is measured:
each prediction is compared with the time that was measured after it, before the model learns from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, FileError, TesseraError, user_location
from tessera.core.schedule import read_json, write_json
from tessera.frontend.kernel.autotuning import Autotuner, SearchConfiguration
from tessera.tools.performance.candidates import Candidate, Candidates
from tessera.tools.performance.cost_models import Device, PerformanceModel, RooflineModel

RIDGE = 1e-3
LEAST_SAMPLES = 6  # below which only the roofline is used


@dataclass(frozen=True)
class ModelError:
    """How far predictions were from measurements that the model had not seen.

    `median` and `worst` are of |log(predicted / measured)|, as factors (1.2: 20 % off). `rank` is Spearman's
    correlation of predicted and measured times. `count` predictions were compared.
    """

    median: float
    worst: float
    rank: float
    count: int

    def __str__(self) -> str:
        off = f"off by a factor of {self.median:.2f} (median of {self.count}; worst {self.worst:.2f})"
        return f"{off}, rank {self.rank:.2f}"


def measure_error(predicted: Iterable[float], measured: Iterable[float]) -> ModelError:
    """The error of predictions.

    >>> str(measure_error([1.0, 2.0, 4.0], [1.0, 4.0, 8.0]))
    'off by a factor of 2.00 (median of 3; worst 2.00), rank 1.00'

    Raises:
        ArgumentError: there are none, or times that are not positive.
    """
    p, m = np.array(list(predicted), np.float64), np.array(list(measured), np.float64)
    if not len(p) or p.shape != m.shape or not (np.isfinite(p) & np.isfinite(m) & (p > 0) & (m > 0)).all():
        raise ArgumentError(
            "there is no error to measure", location=user_location(), expected="as many positive times as predictions"
        )
    off = np.exp(np.abs(np.log(p / m)))
    return ModelError(float(np.median(off)), float(off.max()), _correlate_ranks(p, m), len(p))


def _correlate_ranks(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation; ties have the mean of their ranks. 1 where one of both is constant."""
    x, y = (_rank(v) for v in (a, b))
    spread = x.std() * y.std()
    return float(((x - x.mean()) * (y - y.mean())).mean() / spread) if spread else 1.0


def _rank(values: np.ndarray) -> np.ndarray:
    return np.array([(values < v).sum() + ((values == v).sum() - 1) / 2 for v in values], np.float64)


class HybridModel(PerformanceModel):
    """The roofline of a device, corrected by what was measured; `learn` takes measurements, `error` tells its error.

    Without enough measurements it is the roofline. One model serves one kernel, in all its shapes.

    Raises:
        ArgumentError: no device of this name is known.
    """

    def __init__(self, device: str | Device = "cpu") -> None:
        self.analytic = RooflineModel(device)
        self._names: list[str] = []
        self._rows: list[dict[str, float]] = []
        self._targets: list[float] = []
        self._weights: np.ndarray | None = None
        self.compared: list[tuple[float, float]] = []  # predicted before it was learned, and measured: seconds

    def predict(self, kernel: Candidate) -> float:
        base = self.analytic.predict(kernel)
        if self._weights is None:
            return base
        return base * math.exp(float(np.clip(self._encode(_extract(kernel)) @ self._weights, -20, 20)))

    @property
    def has_learned(self) -> bool:
        """Whether it has more than the roofline."""
        return self._weights is not None

    def learn(self, kernel: Candidate, seconds: float) -> None:
        """Take a measurement; what the model said of it before is kept for `error`.

        Raises:
            ArgumentError: the time is not positive.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            raise ArgumentError("no time", location=user_location(), expected="seconds > 0", received=repr(seconds))
        self.compared.append((self.predict(kernel), seconds))
        self._add(_extract(kernel), math.log(seconds / self.analytic.predict(kernel)))

    def _add(self, row: Mapping[str, float], target: float) -> None:
        self._rows.append(dict(row))
        self._targets.append(target)
        if len(self._rows) >= LEAST_SAMPLES:
            self._fit()

    def _fit(self) -> None:
        self._names = sorted({n for row in self._rows for n in row})
        rows = np.array([self._encode(r) for r in self._rows])
        penalty = RIDGE * len(rows) * np.eye(rows.shape[1])
        penalty[0, 0] = 0.0  # the mean is free
        self._weights = np.linalg.solve(rows.T @ rows + penalty + 1e-9 * np.eye(len(penalty)), rows.T @ self._targets)

    def _encode(self, row: Mapping[str, float]) -> np.ndarray:
        """A constant, the features, and the products of those of the configuration in pairs, each about 1."""
        values = np.array([row.get(n, 0.0) / 8.0 for n in self._names])
        chosen = values[[n.startswith("config ") for n in self._names]]
        pairs = np.outer(chosen, chosen)[np.triu_indices(len(chosen))]
        return np.concatenate([[1.0], values, pairs])

    @property
    def error(self) -> ModelError | None:
        """The error of predictions made before their measurement was learned; None before there are any."""
        if not self.compared:
            return None
        return measure_error(*zip(*self.compared, strict=True))

    def save(self, path: str | Path) -> Path:
        """Write what was learned as JSON."""
        held = {"rows": self._rows, "targets": self._targets, "device": self.analytic.device.name}
        return write_json(path, held)

    @classmethod
    def load(cls, path: str | Path) -> HybridModel:
        """A model with what another one has learned.

        Raises:
            FileError: the file is missing, no JSON, or of another schema.
        """
        held = read_json(path, "rows", "targets", "device")
        model = cls(held["device"])
        try:
            pairs = [({str(k): float(v) for k, v in r.items()}, float(t)) for r, t in
                     zip(held["rows"], held["targets"], strict=True)]  # fmt: skip
            if not all(math.isfinite(x) for r, t in pairs for x in (*r.values(), t)):
                raise ValueError("a number is not finite")
        except (AttributeError, TypeError, ValueError) as error:
            raise FileError(f"{path} holds no measurements", received=str(error)) from None
        for row, target in pairs:
            model._add(row, target)
        return model

    def __repr__(self) -> str:
        return f"HybridModel({self.analytic.device.name})"


def _extract(kernel: Candidate) -> dict[str, float]:
    """The features of a configuration: logarithms of its numbers, of the sizes and of the counts."""
    found = {f"config {k}": math.log2(v) for k, v in kernel.config.items() if _is_positive(v)}
    found |= {f"config {k} is {v!r}": 8.0 for k, v in kernel.config.items() if not _is_positive(v)}
    types = kernel.launch.kernel.bind(kernel.owner.args, kernel.owner.named).types
    for name, type in types.items():
        sizes = enumerate(getattr(type, "shape", ()))
        found |= {f"{name} {axis}": math.log2(max(int(n), 1)) for axis, n in sizes}
    counts = {"flops": kernel.count_flops(), "bytes": kernel.count_memory_bytes(), "groups": kernel.groups}
    return found | {k: math.log2(max(n, 1)) for k, n in counts.items()}


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


class WarmStart(Autotuner):
    """A search that measures the `keep` configurations that a model predicts to be the fastest, and teaches the model.

    While the model has learned nothing, all configurations are measured. Keep one for all shapes of a kernel:

    >>> search = WarmStart(HybridModel("H100"), keep=3)
    >>> search.about
    'WarmStart(HybridModel(H100), keep=3)'

    Raises:
        ArgumentError: `keep` is no positive int.
    """

    def __init__(self, model: HybridModel | None = None, keep: int = 4) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ArgumentError("keep is no count", location=user_location(), expected="1 or more", received=repr(keep))
        self.model, self.keep = model or HybridModel(), keep
        self._kernel: Candidates | None = None
        self._suggested: list[SearchConfiguration] = []

    def begin(self, kernel: Candidates, input_shapes: Any) -> None:
        """Begin a search: the configurations are ranked by what the model knows now."""
        self._kernel = kernel
        ranked = kernel.ranked(self.model)[: self.keep] if self.model.has_learned else []
        self._suggested = [each.config for each in ranked if math.isfinite(each.latency_ms)]

    def suggest_configs(self, kernel: Candidates, input_shapes: Any) -> Iterable[SearchConfiguration]:
        """The configurations that were ranked best; all of them while nothing was learned."""
        return self._suggested or kernel.configs

    def update(self, config: SearchConfiguration, performance: float) -> None:
        """Teach the model a measurement."""
        if self._kernel is None or not math.isfinite(performance) or performance <= 0:
            return
        try:
            self.model.learn(self._kernel.at(config), performance / 1e3)
        except TesseraError:  # what the interpreter cannot count is not learned
            return

    @property
    def about(self) -> str:
        return f"WarmStart({self.model!r}, keep={self.keep})"


__all__ = ["HybridModel", "ModelError", "WarmStart", "measure_error"]
