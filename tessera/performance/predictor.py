"""PerformancePredictor: latencies learned from what was measured, by ridge regression."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, here
from tessera.performance.candidate import Features

_RIDGE = 1e-3  # keeps the system solvable where fewer configurations were measured than there are terms


@dataclass(frozen=True)
class Predictions:
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

    def predict(self, features: Features) -> Predictions:
        """A latency for each configuration; its features are remembered for `retrain`."""
        rows = [_terms(row) for row in features.rows]
        self._rows.update({_key(c): r for c, r in zip(features.configs, rows, strict=True)})
        if self._weights is None or len(self._weights) != len(rows[0]):
            return Predictions(features.configs, np.ones(len(rows)))
        return Predictions(features.configs, np.exp(np.array(rows) @ self._weights))

    def top_k_configs(self, predictions: Predictions, k: int = 10) -> list[Mapping[str, Any]]:
        """The k configurations that are predicted to be the fastest; of two alike the first given."""
        order = np.argsort(predictions.latency_ms, kind="stable")[:k]
        return [predictions.configs[int(i)] for i in order]

    def retrain(self, history: Iterable[tuple[Mapping[str, Any], float]]) -> None:
        """Fit to (configuration, milliseconds); configurations that could not run (infinity) are left out.

        Raises:
            ArgumentError: a configuration's features were never shown to `predict`.
        """
        ran = [(config, ms) for config, ms in history if math.isfinite(ms) and ms > 0]
        unknown = [config for config, _ in ran if _key(config) not in self._rows]
        if unknown:
            raise ArgumentError(
                f"the features of {dict(unknown[0])} are not known", location=here(),
                suggestion="predictor.predict(features) shows them",
            )  # fmt: skip
        if not ran:
            return
        rows = np.array([self._rows[_key(config)] for config, _ in ran])
        penalty = _RIDGE * np.eye(rows.shape[1])
        penalty[0, 0] = 0  # the mean is free
        self._weights = np.linalg.lstsq(rows.T @ rows + penalty, rows.T @ np.log([ms for _, ms in ran]), rcond=None)[0]


def _terms(row: np.ndarray) -> np.ndarray:
    """A constant, the features, and their products in pairs."""
    pairs = np.outer(row, row)[np.triu_indices(len(row))]
    return np.concatenate([[1.0], row, pairs])


def _key(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, repr(v)) for k, v in config.items()))
