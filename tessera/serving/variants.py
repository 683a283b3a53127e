"""A/B tests: routing of users to variants by a stable hash, and Welch's t-test between the variants' metrics."""

from __future__ import annotations

import hashlib
import inspect
import math
import time
from collections import deque
from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import ArgumentError, UnknownNameError, user_location
from tessera.monitoring.statistics import welch_t_test

KEPT = 100_000  # values of a metric, for each variant


class VariantComparison(NamedTuple):
    """Two variants, their mean values of a metric, and the probability of such a difference under equal means."""

    a: str
    b: str
    mean_a: float
    mean_b: float
    p_value: float
    significant: bool


def select_variant(user_id: str, weights: Mapping[str, float], salt: str = "") -> str:
    """The variant of a user: the same in every process and version, in the shares of the weights (SHA-256).

    >>> select_variant("user 7", {"a": 1, "b": 1}), select_variant("user 7", {"a": 0, "b": 1})
    ('a', 'b')

    Raises:
        ArgumentError: there is no variant with a weight, or a weight is negative or not finite.
    """
    total = math.fsum(weights.values()) if weights else 0.0
    if not all(0 <= w < math.inf for w in weights.values()) or not 0 < total < math.inf:
        raise ArgumentError("the weights of the variants are not valid", location=user_location(),
                            expected="0 or more, one of them positive", received=dict(weights))  # fmt: skip
    digest = hashlib.sha256(f"{len(salt)}:{salt}{user_id}".encode("utf-8", "surrogatepass")).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64 * total
    names = sorted(n for n, w in weights.items() if w > 0)
    for name in names:
        place -= weights[name]
        if place < 0:
            return name
    return names[-1]


class ABTest:
    """Routes requests to variants, functions or replicas with `infer`, by their users, and compares latencies.

    `weights` are the shares of the variants (equal by default). Another `salt` is another assignment of users.

    >>> import asyncio
    >>> test = ABTest({"old": lambda x: x, "new": lambda x: x})
    >>> test.select_variant("alice") == test.select_variant("alice")
    True
    >>> asyncio.run(test.route_request(3, user_id="alice"))
    3
    """

    def __init__(
        self, variants: Mapping[str, Any], weights: Mapping[str, float] | None = None, salt: str = "",
        significance: float = 0.05,
    ) -> None:  # fmt: skip
        given = isinstance(variants, Mapping) and (weights is None or isinstance(weights, Mapping))
        if not given or len(variants) < 2 or (weights is not None and set(weights) != set(variants)):
            raise ArgumentError("an A/B test has two variants or more, each with a weight", location=user_location(),
                                received=f"variants {variants!r:.200}, weights {weights!r:.200}")  # fmt: skip
        if not 0 < significance < 1:
            raise ArgumentError(f"a significance of {significance!r}", location=user_location(), expected="in (0, 1)")
        self.variants, self.salt, self.significance = dict(variants), salt, significance
        self.weights = dict(weights) if weights is not None else dict.fromkeys(variants, 1.0)
        select_variant("", self.weights)
        self.metrics: dict[str, dict[str, deque[float]]] = {name: {} for name in variants}

    def select_variant(self, user_id: str) -> str:
        """The variant of a user."""
        return select_variant(user_id, self.weights, self.salt)

    async def route_request(self, request: Any, user_id: str | None = None) -> Any:
        """The result of a request by its user's variant; the latency is recorded in seconds."""
        user = getattr(request, "user_id", "") if user_id is None else user_id
        name = self.select_variant(user)
        target = self.variants[name]
        start = time.perf_counter()
        result = (target.infer if hasattr(target, "infer") else target)(request)
        if inspect.isawaitable(result):
            result = await result
        self.record(name, "latency", time.perf_counter() - start)
        return result

    def record(self, variant: str, metric: str, value: float) -> None:
        """Record a value of a metric for a variant.

        Raises:
            ArgumentError: the value is not finite.
            UnknownNameError: there is no such variant.
        """
        if variant not in self.metrics:
            raise UnknownNameError(f"there is no variant {variant!r}", location=user_location(),
                                   expected=", ".join(self.metrics))  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
            raise ArgumentError(f"the value of {metric} is {value!r}", location=user_location(),
                                expected="a finite number")  # fmt: skip
        self.metrics[variant].setdefault(metric, deque(maxlen=KEPT)).append(float(value))

    def analyze_results(self, metric: str = "latency") -> list[VariantComparison]:
        """Each pair of variants that have two values or more, compared by Welch's t-test.

        With more than two variants the probabilities are corrected for their number (Bonferroni).
        """
        held = {n: list(m.get(metric, ())) for n, m in self.metrics.items()}
        pairs = [(a, b) for a, b in combinations(held, 2) if min(len(held[a]), len(held[b])) > 1]
        found = []
        for a, b in pairs:
            constant = len({*held[a]}) == 1 and len({*held[b]}) == 1
            p = float(held[a][0] == held[b][0]) if constant else welch_t_test(held[a], held[b]).p_value
            p = min(1.0, p * len(pairs))
            means = float(np.mean(held[a])), float(np.mean(held[b]))
            found.append(VariantComparison(a, b, *means, p, p < self.significance))
        return found
