"""Drift detection: compares the values that a model receives with a stored baseline (Kullback-Leibler divergence)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, FileError, user_location
from tessera.core.io import as_path, write_file
from tessera.monitoring.statistics import count_bins, kl_divergence, to_floats

SMOOTHING = 0.5  # of a value, in each bin (Jeffreys)


class DriftDetector:
    """A histogram of a baseline, and a window of the newest values, whose divergence from it is measured.

    `edges` are the limits of the bins, `baseline` the number of values in each. `window` values are collected before
    there is a result; then each new value replaces the oldest.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> detector = DriftDetector.from_values(rng.normal(size=5000), threshold=0.1)
    >>> detector.update(rng.normal(size=1000)), detector.update(3 + rng.normal(size=1000))
    (False, True)

    Raises:
        ArgumentError: the baseline does not fit the edges, or a number is out of its range.
    """

    def __init__(
        self, edges: Sequence[float], baseline: Sequence[float], threshold: float = 0.1, window: int = 1000
    ) -> None:
        self.edges, self.baseline = to_floats(edges, "edges"), to_floats(baseline, "baseline")
        if len(self.edges) != len(self.baseline) + 1 or not (np.diff(self.edges) > 0).all():
            raise ArgumentError("the baseline does not fit the edges", location=user_location(),
                                expected="increasing edges, one more than bins",
                                received=f"{len(self.edges)} edges, {len(self.baseline)} bins")  # fmt: skip
        if (self.baseline < 0).any() or not self.baseline.sum() > 0:
            raise ArgumentError("the baseline is no histogram", location=user_location(),
                                expected="bins of 0 or more, not all 0")  # fmt: skip
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 < threshold < math.inf:
            raise ArgumentError(f"a threshold of {threshold!r}", location=user_location(), expected="more than 0")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ArgumentError(f"a window of {window!r}", location=user_location(), expected="a positive integer")
        self.threshold, self.window = float(threshold), window
        self._values = np.zeros(0)

    @classmethod
    def from_values(cls, values: Any, bins: int = 20, threshold: float = 0.1, window: int = 1000) -> DriftDetector:
        """A detector whose baseline is a sample: bins with about as many values each (quantiles).

        Raises:
            ArgumentError: the sample has fewer different values than bins.
        """
        held = to_floats(values, "values")
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
            raise ArgumentError(f"{bins!r} bins", location=user_location(), expected="a positive integer")
        edges = np.unique(np.quantile(held, np.linspace(0, 1, bins + 1)))
        if len(edges) < 2:
            raise ArgumentError("all values of the baseline are equal", location=user_location())
        return cls(edges.tolist(), count_bins(held, edges).tolist(), threshold, window)

    @property
    def divergence(self) -> float:
        """The divergence of the window from the baseline, in nats; 0 while the window is not full."""
        if len(self._values) < self.window:
            return 0.0
        share = SMOOTHING / len(self.baseline)
        scaled = self.baseline * (len(self._values) / self.baseline.sum())
        return kl_divergence(count_bins(self._values, self.edges), scaled, share)

    def update(self, values: Any) -> bool:
        """Add values; whether the window has drifted from the baseline.

        Raises:
            ArgumentError: one is not finite.
        """
        self._values = np.concatenate([self._values, to_floats(values, "values")])[-self.window :]
        return self.divergence > self.threshold

    def save(self, path: str | Path) -> Path:
        """Write the baseline as JSON, whole or not at all."""
        fields = {"edges": self.edges.tolist(), "baseline": self.baseline.tolist(), "threshold": self.threshold,
                  "window": self.window}  # fmt: skip
        target = Path(path)
        write_file(target, lambda file: file.write(json.dumps(fields, indent=1).encode()))
        return target

    @classmethod
    def load(cls, path: str | Path) -> DriftDetector:
        """A detector that `save` wrote.

        Raises:
            FileError: the file is missing, or holds something else.
        """
        path = as_path(path)
        try:
            fields = json.loads(path.read_text())
            return cls(**{name: fields[name] for name in ("edges", "baseline", "threshold", "window")})
        except (OSError, ValueError, LookupError, TypeError, ArgumentError, RecursionError) as error:
            raise FileError(f"{path.name} is no baseline of drift detection", location=user_location(),
                            received=f"{type(error).__name__}: {error}",
                            suggestion="write it with DriftDetector.save") from None  # fmt: skip
