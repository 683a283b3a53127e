"""Structured logs: a JSON object a line, with the fields of an event, through Python's `logging`."""

from __future__ import annotations

import json
import logging
import math
import sys
from typing import Any, TextIO

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.ir.tensor import Tensor

RESERVED = ("time", "level", "logger", "message", "error")


class JSONFormatter(logging.Formatter):
    """A log record as a line of JSON: time, level, logger, message, and the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; a record's traceback is its field `error`."""
        found = {"time": round(record.created, 6), "level": record.levelname.lower(), "logger": record.name,
                 "message": record.getMessage(), **getattr(record, "fields", {})}  # fmt: skip
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(_to_plain(found), ensure_ascii=True, allow_nan=False)


def _to_plain(value: Any) -> Any:
    """A value as JSON has it; a number that is not finite is text, and what else there is, too."""
    if isinstance(value, (np.generic, np.ndarray, Tensor)):
        held = np.asarray(value.numpy() if isinstance(value, Tensor) else value)
        return _to_plain(held.tolist()) if held.size <= 16 else f"{held.dtype}{list(held.shape)}"
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, dict):
        return {str(k): _to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


class Logger:
    """Writes events as lines of JSON to `stream` (standard error), from `level` on.

    >>> import sys
    >>> log = Logger("service", stream=sys.stdout)
    >>> log.debug("not shown")
    >>> log.info("loaded", model="mlp")  # doctest: +ELLIPSIS
    {"time": ..., "level": "info", "logger": "service", "message": "loaded", "model": "mlp"}
    """

    def __init__(self, name: str = "tessera", level: str = "info", stream: TextIO | None = None) -> None:
        if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
            raise ArgumentError(f"the level {level!r} is unknown", location=user_location(),
                                expected="debug, info, warning, error, critical")  # fmt: skip
        handler = logging.StreamHandler(stream or sys.stderr)
        handler.setFormatter(JSONFormatter())
        self.inner = logging.Logger(name, level.upper())  # one of its own: two loggers of a name do not write twice
        self.inner.addHandler(handler)

    def log(self, level: str, message: str, **fields: Any) -> None:
        """Write an event.

        Raises:
            ArgumentError: a field has the name of one that every line has.
        """
        for name in fields:
            if name in RESERVED:
                raise ArgumentError(f"a field cannot be called {name}", location=user_location())
        self.inner.log(getattr(logging, level.upper()), message, extra={"fields": fields})

    def debug(self, message: str, **fields: Any) -> None:
        """Write an event of level debug."""
        self.log("debug", message, **fields)

    def info(self, message: str, **fields: Any) -> None:
        """Write an event of level info."""
        self.log("info", message, **fields)

    def warning(self, message: str, **fields: Any) -> None:
        """Write an event of level warning."""
        self.log("warning", message, **fields)

    def error(self, message: str, **fields: Any) -> None:
        """Write an event of level error."""
        self.log("error", message, **fields)

    def critical(self, message: str, **fields: Any) -> None:
        """Write an event of level critical."""
        self.log("critical", message, **fields)
