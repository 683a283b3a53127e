"""Response cache: the results of requests by the hash of their content, the least recently used evicted (LRU)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, user_location

EVICTION_POLICIES = ("lru", "fifo")


class CacheManager:
    """Keeps up to `cache_size` results, of up to `max_bytes` of arrays together; 0 of either keeps none.

    Arrays of a result are copied when they are put, and are read-only in what `get` returns.

    >>> cache = CacheManager(cache_size=2, eviction_policy="lru")
    >>> for key in "ab":
    ...     cache.put(key, key.upper())
    >>> cache.get("a"), cache.put("c", "C"), cache.get("b")
    ('A', None, None)

    Raises:
        ArgumentError: a size is negative, or the policy unknown.
    """

    def __init__(self, cache_size: int = 1024, eviction_policy: str = "lru", max_bytes: int = 1 << 28) -> None:
        for name, value in (("cache_size", cache_size), ("max_bytes", max_bytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ArgumentError(f"{name} is {value!r}", location=user_location(), expected="0 or more")
        if eviction_policy not in EVICTION_POLICIES:
            raise ArgumentError(f"the eviction policy {eviction_policy!r} is unknown", location=user_location(),
                                expected=", ".join(EVICTION_POLICIES))  # fmt: skip
        self.cache_size, self.eviction_policy, self.max_bytes = cache_size, eviction_policy, max_bytes
        self.hits = self.misses = self.bytes = 0
        self._held: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: str) -> Any:
        """The result of a key, or None."""
        with self._lock:
            if key not in self._held:
                self.misses += 1
                return None
            self.hits += 1
            if self.eviction_policy == "lru":
                self._held.move_to_end(key)
            return self._held[key][0]

    def put(self, key: str, result: Any) -> None:
        """Keep a result; one that alone is larger than `max_bytes` is not kept."""
        held = _freeze(result)
        size = _count_bytes(held)
        with self._lock:
            if key in self._held:
                self.bytes -= self._held.pop(key)[1]
            if size > self.max_bytes or not self.cache_size:
                return
            self._held[key] = held, size
            self.bytes += size
            while len(self._held) > self.cache_size or self.bytes > self.max_bytes:
                self.bytes -= self._held.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forget all results."""
        with self._lock:
            self._held.clear()
            self.bytes = 0


def _freeze(result: Any) -> Any:
    if isinstance(result, np.ndarray):
        held = result.copy()
        held.setflags(write=False)
        return held
    if isinstance(result, Mapping):
        return {k: _freeze(v) for k, v in result.items()}
    if isinstance(result, (list, tuple)):
        return type(result)([_freeze(v) for v in result])
    return result


def _count_bytes(result: Any) -> int:
    if isinstance(result, np.ndarray):
        return result.nbytes
    if isinstance(result, Mapping):
        return sum(map(_count_bytes, result.values()))
    return sum(map(_count_bytes, result)) if isinstance(result, (list, tuple)) else 0
