"""Benchmarking: the time of a call after warm-up, as Triton's `triton.testing.do_bench` measures it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.runtime.launch.streams import synchronize

_STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda times: float(np.mean(times)),
    "median": lambda times: float(np.median(times)),
    "min": lambda times: float(np.min(times)),
    "max": lambda times: float(np.max(times)),
}
ESTIMATE_CALLS = 5  # short calls whose mean gives the number of the others


def bench(
    fn: Callable[..., Any], *args: Any, warmup: float = 25, rep: float = 100,
    quantiles: Sequence[float] | None = None, return_mode: str = "mean", **named: Any,
) -> Any:  # fmt: skip
    """Measure the milliseconds of `fn(*args, **named)`: warm calls, each timed until all streams are idle.

    The first call, which compiles, is not counted. `warmup` and `rep` are the milliseconds to spend on calls before
    and during the measurement; each makes at least one call. `quantiles` gives a list of quantiles;
    else `return_mode` selects "mean", "median", "min", "max", or "all" (a list of every time). Caches are not cleared
    between calls, and a call on a GPU includes the copies of host arrays.

    Raises:
        ArgumentError: `fn` is no function, the mode has another name, or a quantile is not in [0, 1].

    >>> import numpy as np
    >>> import tessera as ts
    >>> low, high = ts.testing.bench(ts.jit(lambda x: x + 1.0), np.ones(8, np.float32), rep=1, quantiles=[0.2, 0.8])
    >>> 0 < low <= high
    True
    """
    _check_request(fn, quantiles, return_mode)

    def call() -> float:
        start = time.perf_counter()
        fn(*args, **named)
        synchronize()
        return (time.perf_counter() - start) * 1e3

    call()
    estimate = call()
    if estimate < warmup + rep:
        estimate = sum(call() for _ in range(ESTIMATE_CALLS)) / ESTIMATE_CALLS
    for _ in range(round(warmup / estimate)):
        call()
    times = [call() for _ in range(max(1, round(rep / estimate)))]
    if quantiles is not None:
        return [float(q) for q in np.quantile(times, quantiles)]
    return times if return_mode == "all" else _STATISTICS[return_mode](times)


def _check_request(fn: Any, quantiles: Sequence[float] | None, return_mode: str) -> None:
    if not callable(fn):
        raise ArgumentError(
            "bench measures calls of a function", expected="bench(fn, *args)", received=type(fn).__name__,
            location=user_location(), suggestion="bench(kernel[grid], x, out)",
        )  # fmt: skip
    if return_mode not in (*_STATISTICS, "all"):
        raise ArgumentError(
            f"{return_mode!r} is not a statistic", expected=", ".join([*_STATISTICS, "all"]), location=user_location()
        )
    if quantiles is not None and not all(0 <= q <= 1 for q in quantiles):
        raise ArgumentError("a quantile is outside [0, 1]", received=list(quantiles), location=user_location())
