"""Host memory: pools, memory-mapped files, asynchronous copies and prefetching."""

from importlib import import_module
from typing import Any

from tessera.core.types import DISK, HOST

# Where each name is defined. Modules are imported when first asked for: few programs need them.
HOMES = {
    "Future": "async_copies",
    "Pool": "memory_pool",
    "Resident": "memory_spaces",
    "as_bytes": "memory_pool",
    "as_placed": "memory_spaces",
    "async_copy": "async_copies",
    "async_load": "async_copies",
    "async_store": "async_copies",
    "buffer": "memory_pool",
    "flush": "memory_spaces",
    "made": "memory_spaces",
    "near": "async_copies",
    "on_disk": "memory_spaces",
    "pipelined": "async_copies",
    "prefetch_to_l2": "async_copies",
    "reuse": "memory_pool",
    "space_of": "memory_spaces",
    "use_pool": "memory_pool",
}
__all__ = ["DISK", "HOST", *sorted(HOMES)]  # noqa: PLE0604 - all of them are names


def find_storage_function(name: str) -> Any:
    """A public name of this package; its module is imported now."""
    return getattr(import_module(f"tessera.runtime.storage.{HOMES[name]}"), name)


def __getattr__(name: str) -> Any:
    """A part of this package, by name."""
    if name in HOMES:
        return find_storage_function(name)
    raise AttributeError(f"module 'tessera.runtime.storage' has no attribute {name!r}")
