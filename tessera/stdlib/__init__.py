"""The standard library: kernels written in the kernel language, with functions on arrays that launch them.

Each takes another schedule through `.with_schedule(ts.Schedule(...))`.

>>> from tessera.stdlib import stable_softmax
>>> stable_softmax([0.0, 0.0])
array([0.5, 0.5])
"""

from importlib import import_module
from typing import Any

# The module of each name, imported on first use: the kernel language imports this package for its own composites
# (online_softmax) before `kernel` is defined.
HOMES = {
    "batched_matmul": "gemm",
    "cross_entropy": "losses",
    "efficient_layernorm": "normalisation",
    "flash_attention": "attention",
    "flash_attention_2": "attention",
    "fused_adam": "optimisers",
    "grouped_matmul": "gemm",
    "matmul": "gemm",
    "quantized_matmul": "gemm",
    "rms_norm": "normalisation",
    "rotary_embedding": "attention",
    "stable_softmax": "normalisation",
    "tree_sum": "deterministic_reductions",
}
__all__ = sorted(HOMES)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """A routine, by name."""
    if name in HOMES:
        return getattr(import_module(f"tessera.stdlib.{HOMES[name]}"), name)
    raise AttributeError(f"module 'tessera.stdlib' has no attribute {name!r}")
