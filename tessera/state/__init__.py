"""State objects: tensors that calls change, as explicit arguments and results of compiled programs; caches.

>>> from tessera.state import RingBuffer
>>> RingBuffer(1, 4, 2).capacity
4
"""

from importlib import import_module
from typing import Any

# The module of each name, imported on first use.
HOMES = {
    "Cache": "caches",
    "KVCache": "kv_cache",
    "PageTable": "caches",
    "RingBuffer": "caches",
    "Stateful": "stateful_objects",
    "offload": "offloading",
    "prefetch": "offloading",
    "rolling_window": "kv_cache",
    "stateful": "stateful_objects",
    "with_state": "stateful_objects",
}
__all__ = sorted(HOMES)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """A name of the package."""
    if name in HOMES:
        return getattr(import_module(f"tessera.state.{HOMES[name]}"), name)
    raise AttributeError(f"module 'tessera.state' has no attribute {name!r}")
