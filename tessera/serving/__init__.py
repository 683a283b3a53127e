"""Serving: batching, caching and replicas for models, and an HTTP application for models and language models.

>>> from tessera.serving import CacheManager
>>> cache = CacheManager(cache_size=2)
>>> cache.put("a", 1), cache.get("a"), cache.get("b")
(None, 1, None)
"""

from importlib import import_module
from typing import Any

# The module of each name, imported on first use.
HOMES = {
    "ABTest": "variants",
    "BatchSlot": "batching",
    "CacheManager": "response_cache",
    "ContinuousBatchingServer": "generation_engine",
    "DynamicBatcher": "batching",
    "GenerationEngine": "generation_engine",
    "InferenceRequest": "requests",
    "LoadBalancer": "replicas",
    "ProcessReplica": "replicas",
    "RequestBatch": "batching",
    "ServedLanguageModel": "language_models",
    "ServedModel": "served_models",
    "ServerOptions": "options",
    "TensorDescription": "served_models",
    "ThreadReplica": "replicas",
    "VariantComparison": "variants",
    "create_app": "application",
    "run_server": "server",
    "select_variant": "variants",
    "uuid": "requests",
}
__all__ = sorted(HOMES)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """A name of the package."""
    if name in HOMES:
        return getattr(import_module(f"tessera.serving.{HOMES[name]}"), name)
    raise AttributeError(f"module 'tessera.serving' has no attribute {name!r}")
