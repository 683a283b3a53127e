"""Memory as the host has it: pools, files as memory, copies under way, and what is brought nearer before it is read."""

from importlib import import_module
from typing import Any

# Spaces of the host, beside those that kernels know (tessera/types.py).
HOST, DISK = "host", "disk"
# Where each name is defined. Modules are imported when first asked for: few programs need them.
HOMES = {
    "Future": "movement",
    "Pool": "pool",
    "Resident": "resident",
    "as_bytes": "sizes",
    "as_placed": "spaces",
    "async_copy": "movement",
    "async_load": "pipelines",
    "async_store": "pipelines",
    "buffer": "buffers",
    "flush": "spaces",
    "made": "spaces",
    "near": "movement",
    "on_disk": "spaces",
    "pipelined": "pipelines",
    "prefetch_to_l2": "movement",
    "reuse": "buffers",
    "space_of": "spaces",
    "use_pool": "pool",
}
__all__ = ["DISK", "HOST", *sorted(HOMES)]  # noqa: PLE0604 - all of them are names


def __getattr__(name: str) -> Any:
    """A part of this package, by name."""
    if name in HOMES:
        return getattr(import_module(f"tessera.storage.{HOMES[name]}"), name)
    raise AttributeError(f"module 'tessera.storage' has no attribute {name!r}")
