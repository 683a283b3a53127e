"""Service metrics: what a server counts, in Prometheus's format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera.monitoring.metrics import import_prometheus

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
METHODS = ("GET", "POST")


class ServiceMetrics:
    """The metrics of one server, in a registry of its own.

    Raises:
        DeviceUnavailable: `prometheus_client` is not installed.
    """

    def __init__(self) -> None:
        self._library: Any = import_prometheus()
        self.registry = self._library.CollectorRegistry()
        make = self._make
        self.requests = make("Counter", "http_requests", "Requests by method and status.", ("method", "status"))
        self.seconds = make("Histogram", "http_request_seconds", "Duration of POST requests.", buckets=SECONDS)
        self.open = make("Gauge", "open_requests", "POST requests in work.")
        self.infer_seconds = make("Histogram", "inference_seconds", "Duration of inference.", ("model",), SECONDS)
        self.tokens = make("Counter", "tokens", "Tokens of language models.", ("model", "kind"))
        self.first_token = make("Histogram", "first_token_seconds", "Time to the first token.", ("model",), SECONDS)

    def _make(
        self, kind: str, name: str, text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
    ) -> Any:
        named: dict[str, Any] = {"buckets": buckets} if buckets else {}
        return getattr(self._library, kind)(f"tessera_{name}", text, labels, registry=self.registry, **named)

    def gauge(self, name: str, text: str, model: str, read: Callable[[], float]) -> None:
        """A gauge of a model whose value is read when metrics are asked for."""
        if not hasattr(self, f"_{name}"):
            setattr(self, f"_{name}", self._make("Gauge", name, text, ("model",)))
        getattr(self, f"_{name}").labels(model).set_function(read)

    def observe(self, method: str, status: int, seconds: float) -> None:
        """Count a request; unknown methods share a label, so that clients cannot make new ones."""
        self.requests.labels(method if method in METHODS else "other", str(status)).inc()
        if method == "POST":
            self.seconds.observe(seconds)

    def set_open(self, count: int) -> None:
        """Note the number of requests in work."""
        self.open.set(count)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return bytes(self._library.generate_latest(self.registry))
