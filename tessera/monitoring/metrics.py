"""Metrics: values and latencies of a service as Prometheus metrics, with percentiles over the newest of them."""

from __future__ import annotations

import functools
import inspect
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DeviceUnavailable, UnknownNameError, user_location
from tessera.ir.tensor import Tensor

WINDOW = 10_000  # values of which percentiles are taken
NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")
LATENCY = "latency"


def import_prometheus() -> Any:
    """The package `prometheus_client`.

    Raises:
        DeviceUnavailable: it is not installed.
    """
    try:
        return import_module("prometheus_client")
    except ImportError:
        raise DeviceUnavailable("the package prometheus_client is not installed", location=user_location(),
                                suggestion="pip install tessera[serve]") from None  # fmt: skip


class MetricsCollector:
    """Collects values by name, and the latencies and failures of the functions that it tracks.

    `registry` is one of prometheus_client, by default one of its own; names of Prometheus begin with `prefix`.
    Values that are not finite are counted, and not part of percentiles.

    >>> metrics = MetricsCollector()
    >>> for n in (1, 2, 3):
    ...     metrics.record("input_length", n)
    >>> metrics.percentile("input_length", 50)
    2.0
    """

    def __init__(self, registry: Any = None, prefix: str = "tessera", window: int = WINDOW) -> None:
        self._prometheus = import_prometheus()
        if not isinstance(prefix, str) or not NAME.match(prefix):
            raise ArgumentError(f"{prefix!r} is no prefix of metrics", location=user_location(),
                                expected="letters, digits and _")  # fmt: skip
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ArgumentError(f"a window of {window!r}", location=user_location(), expected="a positive integer")
        self.registry = registry if registry is not None else self._prometheus.CollectorRegistry()
        self.prefix, self.window = prefix, window
        self._values: dict[str, deque[float]] = {}
        self._metrics: dict[str, Any] = {}
        self._lock = threading.Lock()

    def record(self, name: str, value: Any) -> None:
        """Record a number, or a tensor of one element.

        Raises:
            ArgumentError: the name is none of Prometheus, or the value is no number.
        """
        number = _to_number(value)
        with self._lock:
            summary = self._get("Summary", name, f"Values recorded as {name}.")
            if math.isfinite(number):
                self._values.setdefault(name, deque(maxlen=self.window)).append(number)
                summary.observe(number)
            else:
                self._get("Counter", f"{name}_not_finite", f"Values of {name} that are not finite.").inc()

    def track(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function, or a coroutine function: its calls are timed, and its failures counted."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*args: Any, **named: Any) -> Any:
                start = time.perf_counter()
                try:
                    return await function(*args, **named)
                except BaseException as error:
                    self._fail(error)
                    raise
                finally:
                    self.record(LATENCY, time.perf_counter() - start)

            return call_async

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **named)
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                self.record(LATENCY, time.perf_counter() - start)

        return call

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._get("Counter", "failures", "Calls that raised.", ("error",)).labels(type(error).__name__).inc()

    def percentile(self, name: str, percent: float) -> float:
        """A percentile of the newest values of a name; NaN before the first.

        Raises:
            ArgumentError: the percentage is not in 0 to 100.
        """
        if isinstance(percent, bool) or not isinstance(percent, (int, float)) or not 0 <= percent <= 100:
            raise ArgumentError(f"percentile {percent!r}", location=user_location(), expected="0 to 100")
        with self._lock:
            held = list(self._values.get(name, ()))
        return float(np.percentile(held, percent)) if held else math.nan

    @property
    def latency_p50(self) -> float:
        """The median latency of tracked calls, in seconds; NaN before the first."""
        return self.percentile(LATENCY, 50)

    @property
    def latency_p90(self) -> float:
        """The 90th percentile of latency."""
        return self.percentile(LATENCY, 90)

    @property
    def latency_p95(self) -> float:
        """The 95th percentile of latency."""
        return self.percentile(LATENCY, 95)

    @property
    def latency_p99(self) -> float:
        """The 99th percentile of latency."""
        return self.percentile(LATENCY, 99)

    def count(self, name: str) -> int:
        """How many finite values a name has, of the newest.

        Raises:
            UnknownNameError: nothing was recorded under it.
        """
        if name not in self._values:
            raise UnknownNameError(f"no value {name} was recorded", location=user_location(),
                                   expected=", ".join(sorted(self._values)) or "none yet")  # fmt: skip
        return len(self._values[name])

    def render(self) -> str:
        """All metrics in Prometheus's text format."""
        return str(self._prometheus.generate_latest(self.registry).decode())

    def _get(self, kind: str, name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
        if not isinstance(name, str) or not NAME.match(name):
            raise ArgumentError(f"{name!r} is no name of a metric", location=user_location(),
                                expected="letters, digits and _, and no digit first")  # fmt: skip
        if name not in self._metrics:
            make = getattr(self._prometheus, kind)
            self._metrics[name] = make(f"{self.prefix}_{name}", text, labels, registry=self.registry)
        return self._metrics[name]


def _to_number(value: Any) -> float:
    try:
        held = np.asarray(value.numpy() if isinstance(value, Tensor) else value)
        if held.size == 1 and held.dtype.kind not in "USOMm":
            return float(held.reshape(()).astype(np.float64))
    except (TypeError, ValueError):
        pass
    raise ArgumentError("a metric takes one number", location=user_location(), received=repr(value)[:80])
