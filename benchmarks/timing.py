"""Timing: the best and the median of many runs after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def measure(run: Callable[[], Any], seconds: float = 1.0, least: int = 5) -> dict[str, float]:
    """Seconds of one call: first, best, median, over about `seconds` of calls (at least `least`)."""
    start = time.perf_counter()
    run()
    first = time.perf_counter() - start
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < least or (time.perf_counter() - begin < seconds and len(times) < 1000):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return {"first": first, "best": min(times), "median": statistics.median(times), "runs": len(times)}
