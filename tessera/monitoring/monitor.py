"""Monitored requests (`ts.monitor`): the time, the outcome and the trace of each request of a service."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

from tessera.monitoring.metrics import MetricsCollector

_LOCK = threading.Lock()
_DEFAULT: list[MetricsCollector] = []


def default_metrics() -> MetricsCollector:
    """The metrics that `request` records to where no others are passed."""
    with _LOCK:
        if not _DEFAULT:
            _DEFAULT.append(MetricsCollector())
        return _DEFAULT[0]


@contextmanager
def request(id: Any = None, name: str = "request", metrics: MetricsCollector | None = None) -> Iterator[Any]:
    """A block that serves a request: its duration is recorded as `<name>_seconds`, its failures are counted.

    Where the OpenTelemetry API is installed, the block is a span with the attribute `request.id`; the span is the
    value of the block, otherwise None.

    >>> import tessera as ts
    >>> metrics = ts.monitoring.MetricsCollector()
    >>> with ts.monitor.request("7f3a", metrics=metrics) as span:
    ...     pass
    >>> metrics.count("request_seconds")
    1
    """
    held = metrics if metrics is not None else default_metrics()
    start = time.perf_counter()
    try:
        with span(name, {} if id is None else {"request.id": str(id)}) as made:
            yield made
    except BaseException:
        held.record(f"{name}_failed", 1)
        raise
    finally:
        held.record(f"{name}_seconds", time.perf_counter() - start)


@cache
def _find_tracer() -> Any:
    try:
        return import_module("opentelemetry.trace").get_tracer("tessera")
    except ImportError:
        return None


def span(name: str, attributes: dict[str, Any] | None = None) -> AbstractContextManager[Any]:
    """A span of OpenTelemetry, or a block that does nothing where its API is not installed."""
    tracer = _find_tracer()
    return nullcontext() if tracer is None else tracer.start_as_current_span(name, attributes=attributes or {})
