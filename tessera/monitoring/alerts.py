"""Alerts: named conditions of a service with a severity, delivered to handlers, and not repeated too often."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tessera.core.errors import ArgumentError, user_location

LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR, "critical": logging.CRITICAL}
LOG = logging.getLogger("tessera.alerts")


@dataclass(frozen=True)
class Alert:
    """An alert: its name, its severity, when it was triggered (seconds since 1970), and details."""

    name: str
    severity: str
    time: float
    details: Mapping[str, Any] = field(default_factory=dict)


class AlertManager:
    """Delivers alerts to `handlers`, functions of an `Alert`, and to the log `tessera.alerts`.

    An alert of one name and severity is delivered once in `interval` seconds. `history` has the last ones delivered.

    >>> alerts = AlertManager()
    >>> alerts.trigger("data_drift", severity="warning"), alerts.trigger("data_drift", severity="warning")
    (True, False)
    """

    def __init__(
        self, handlers: tuple[Callable[[Alert], Any], ...] | list[Callable[[Alert], Any]] = (), interval: float = 60.0,
        keep: int = 1000, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        if isinstance(interval, bool) or not isinstance(interval, (int, float)) or not interval >= 0:
            raise ArgumentError(f"an interval of {interval!r}", location=user_location(), expected="seconds, 0 or more")
        self.handlers, self.interval = list(handlers), interval
        self.history: deque[Alert] = deque(maxlen=keep)
        self._last: dict[tuple[str, str], float] = {}
        self._clock, self._lock = clock, threading.Lock()

    def trigger(self, name: str, severity: str = "warning", **details: Any) -> bool:
        """Deliver an alert; whether it was, or was held back as a repetition.

        A handler that raises is logged, and the others are called.

        Raises:
            ArgumentError: the severity is unknown.
        """
        if severity not in LEVELS:
            raise ArgumentError(f"the severity {severity!r} is unknown", location=user_location(),
                                expected=", ".join(LEVELS))  # fmt: skip
        now = self._clock()
        with self._lock:
            last = self._last.get((name, severity))
            if last is not None and now - last < self.interval:
                return False
            self._last[name, severity] = now
            alert = Alert(name, severity, now, details)
            self.history.append(alert)
        LOG.log(LEVELS[severity], "alert %s", name, extra={"fields": {"alert": name, "severity": severity, **details}})
        for handler in list(self.handlers):
            try:
                handler(alert)
            except Exception:
                LOG.exception("a handler of alert %s failed", name)
        return True
