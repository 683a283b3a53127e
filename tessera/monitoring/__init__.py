"""Monitoring: metrics in Prometheus's format, alerts, structured logs, traces of requests, and detection of drift.

>>> from tessera.monitoring import kl_divergence
>>> kl_divergence([1, 1], [1, 1])
0.0
"""

from importlib import import_module
from typing import Any

# The module of each name, imported on first use.
HOMES = {
    "Alert": "alerts",
    "AlertManager": "alerts",
    "DriftDetector": "drift",
    "Logger": "structured_logs",
    "MetricsCollector": "metrics",
    "WelchResult": "statistics",
    "count_bins": "statistics",
    "kl_divergence": "statistics",
    "welch_t_test": "statistics",
}
__all__ = sorted(HOMES)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """A name of the package."""
    if name in HOMES:
        return getattr(import_module(f"tessera.monitoring.{HOMES[name]}"), name)
    raise AttributeError(f"module 'tessera.monitoring' has no attribute {name!r}")
