"""Language models: decoder-only transformers with published weights, paged caches, sampling and text generation.

>>> from tessera.llm import Sampling
>>> Sampling(temperature=0.7, top_p=0.9)
Sampling(temperature=0.7, top_k=0, top_p=0.9, seed=0)
"""

from importlib import import_module
from typing import Any

# The module of each name, imported on first use.
HOMES = {
    "Completion": "generation",
    "DecoderConfig": "config",
    "GGUFFile": "gguf_reader",
    "GenerationScheduler": "scheduling",
    "LanguageModel": "generation",
    "Sampling": "sampling",
    "Tokenizer": "tokenizer",
    "draw_weights": "weights",
    "find_packaged_model": "loading",
    "load": "loading",
    "open_gguf": "gguf_reader",
    "read_config": "config",
    "read_gguf": "gguf_reader",
}
__all__ = sorted(HOMES)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """A name of the package."""
    if name in HOMES:
        return getattr(import_module(f"tessera.llm.{HOMES[name]}"), name)
    raise AttributeError(f"module 'tessera.llm' has no attribute {name!r}")
