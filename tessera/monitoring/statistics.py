"""Statistics of a service: the Kullback-Leibler divergence of histograms, and Welch's t-test (`ts.stats`).

>>> import tessera as ts
>>> round(ts.stats.kl_divergence([0.5, 0.5], [0.9, 0.1]), 6)
0.510826
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import ArgumentError, DeviceUnavailable, ShapeError, user_location
from tessera.ir.tensor import Tensor

__all__ = ["WelchResult", "count_bins", "kl_divergence", "welch_t_test"]


class WelchResult(NamedTuple):
    """A two-sided t-test: the statistic, the degrees of freedom, and the probability under equal means."""

    statistic: float
    degrees: float
    p_value: float


def _import_scipy(module: str) -> Any:
    try:
        return import_module(f"scipy.{module}")
    except ImportError:
        raise DeviceUnavailable("the package scipy is not installed", location=user_location(),
                                suggestion="pip install tessera[serve]") from None  # fmt: skip


def to_floats(values: Any, name: str) -> np.ndarray:
    """A tensor, array or list of numbers as f64, flat.

    Raises:
        ArgumentError: it is empty, or holds something else, or a number that is not finite.
    """
    try:
        held = np.asarray(values.numpy() if isinstance(values, Tensor) else values).astype(np.float64).reshape(-1)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name} holds no numbers", location=user_location(),
                            received=repr(values)[:80]) from None  # fmt: skip
    if not held.size or not np.isfinite(held).all():
        raise ArgumentError(
            f"{name} is empty, or not finite", location=user_location(), expected="finite numbers",
            received=f"{held.size} numbers, {int((~np.isfinite(held)).sum())} of them not finite",
        )  # fmt: skip
    return held


def kl_divergence(p: Any, q: Any, smoothing: float = 0.0) -> float:
    """The Kullback-Leibler divergence of p from the baseline q, in nats: sum p log(p / q).

    Both are histograms over the same bins, or probabilities; each is divided by its sum. `smoothing` is added to each
    bin of both before that, so that an empty bin of the baseline does not make the result infinite.

    >>> kl_divergence([3, 1], [3, 1])
    0.0
    >>> kl_divergence([1, 1], [1, 0])
    inf

    Raises:
        ArgumentError: a bin is negative or not finite, or all are 0.
        ShapeError: they have different numbers of bins.
    """
    held = [to_floats(x, name) for x, name in ((p, "p"), (q, "q"))]
    if len(held[0]) != len(held[1]):
        raise ShapeError("the histograms have different bins", location=user_location(),
                         expected=f"{len(held[1])} bins", received=f"{len(held[0])}")  # fmt: skip
    if not isinstance(smoothing, (int, float)) or not 0 <= smoothing < math.inf:
        raise ArgumentError(f"smoothing {smoothing!r}", location=user_location(), expected="0 or more")
    held = [h + smoothing for h in held]
    for each, name in zip(held, "pq", strict=True):
        if (each < 0).any() or not each.sum() > 0:
            raise ArgumentError(f"{name} is no histogram", location=user_location(),
                                expected="bins of 0 or more, not all 0")  # fmt: skip
    return float(_import_scipy("stats").entropy(*held))


def count_bins(values: Any, edges: Any) -> np.ndarray:
    """The number of values in each bin between the edges; values outside count in the first or last bin.

    >>> count_bins([-5.0, 0.5, 1.5, 9.0], [0, 1, 2]).tolist()
    [2.0, 2.0]

    Raises:
        ArgumentError: there are no two edges, or they do not increase.
    """
    limits = to_floats(edges, "edges")
    if len(limits) < 2 or not (np.diff(limits) > 0).all():
        raise ArgumentError("the edges of bins do not increase", location=user_location(),
                            expected="two or more increasing numbers")  # fmt: skip
    places = np.searchsorted(limits, to_floats(values, "values"), side="right") - 1
    return np.bincount(np.clip(places, 0, len(limits) - 2), minlength=len(limits) - 1).astype(np.float64)


def welch_t_test(a: Sequence[float], b: Sequence[float]) -> WelchResult:
    """Welch's t-test: whether two samples of different variances have one mean.

    Raises:
        ArgumentError: a sample has fewer than two numbers, or both are constant.
    """
    held = [to_floats(x, name) for x, name in ((a, "a"), (b, "b"))]
    if min(map(len, held)) < 2 or not any(np.ptp(h) for h in held):
        raise ArgumentError("the samples are too small for a t-test", location=user_location(),
                            expected="two or more numbers each, that are not all equal",
                            received=f"{len(held[0])} and {len(held[1])}")  # fmt: skip
    found = _import_scipy("stats").ttest_ind(*held, equal_var=False)
    return WelchResult(float(found.statistic), float(found.df), float(found.pvalue))
