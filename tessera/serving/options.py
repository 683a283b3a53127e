"""Options of a server: limits, keys, batching and replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from tessera.core.errors import ArgumentError, as_names, user_location

COUNTS = ("max_body_bytes", "max_json_bytes", "max_buffered_bytes", "max_queue", "max_batch_size", "replicas", "slots")
OPTIONAL_COUNTS = ("longest", "pages")
TIMES = {"body_timeout": "seconds", "drain_timeout": "seconds", "retry_after": "seconds",
         "batch_timeout_ms": "milliseconds"}  # fmt: skip


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server, with the defaults of `tessera serve`.

    `max_queue` requests are served at once or wait, whose bodies have `max_buffered_bytes` together; `max_batch_size` 1
    is without dynamic batching; `cache_size` 0 is without a response cache; `replicas` of a model are processes where
    `processes` is set, else threads. `slots` is the batch of a language model, `longest` the positions of a request
    and `pages` those of its cache.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 64 << 20
    max_json_bytes: int = 4 << 20
    max_buffered_bytes: int = 1 << 30
    max_queue: int = 256
    body_timeout: float = 30.0
    drain_timeout: float = 30.0
    retry_after: float = 1.0
    max_batch_size: int = 1
    batch_timeout_ms: float = 2.0
    padding: str | None = None
    cache_size: int = 0
    replicas: int = 1
    processes: bool = False
    slots: int = 8
    longest: int | None = None
    pages: int | None = None
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if field.name in COUNTS and not _is_count(value, 1):
                raise ArgumentError(f"the option {field.name} is {value!r}", location=user_location(),
                                    expected="a positive integer")  # fmt: skip
            if field.name in TIMES and not _is_time(value):
                raise ArgumentError(f"the option {field.name} is {value!r}", location=user_location(),
                                    expected=f"{TIMES[field.name]}, 0 or more")  # fmt: skip
            if field.name in OPTIONAL_COUNTS and value is not None and not _is_count(value, 1):
                raise ArgumentError(f"the option {field.name} is {value!r}", location=user_location(),
                                    expected="a positive integer, or None")  # fmt: skip
        if not _is_count(self.cache_size, 0):
            raise ArgumentError(f"the option cache_size is {self.cache_size!r}", location=user_location(),
                                expected="0 or more")  # fmt: skip
        if self.padding not in (None, "left", "right"):
            raise ArgumentError(f"the option padding is {self.padding!r}", location=user_location(),
                                expected='"left", "right" or None')  # fmt: skip
        if self.padding is not None and self.max_batch_size == 1:
            raise ArgumentError(f"the option padding is {self.padding!r}, and there are no batches to pad",
                                location=user_location(), suggestion="max_batch_size above 1")  # fmt: skip
        keys = as_names(self.api_keys, "api_keys")
        if not all(keys):
            raise ArgumentError("an API key is empty", location=user_location())
        object.__setattr__(self, "api_keys", keys)
