"""The same calls as `benchmarks.dispatch` in PyTorch eager and jax.jit: run by a Python that has both."""

from __future__ import annotations

import json
import timeit
from collections.abc import Callable
from typing import Any


def microseconds(run: Callable[[], Any], count: int = 100) -> float:
    """The best time of one call, of many rounds so short that other work on the machine misses some of them."""
    run()
    return min(timeit.repeat(run, number=count, repeat=100)) / count * 1e6


def torch_eager() -> dict[str, float]:
    """PyTorch's eager ops on 4x4 tensors."""
    import torch

    x, y = torch.rand(4, 4), torch.rand(4, 4)
    r, index = x[0].clone(), torch.tensor([0, 2])
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: x + y,
        "add a number": lambda: x + 1.0,
        "add a row": lambda: x + r,
        "exp": lambda: torch.exp(x),
        "sum": lambda: x.sum(),
        "mean of rows": lambda: torch.mean(x, dim=-1),
        "var": lambda: x.var(),
        "matmul": lambda: x @ y,
        "softmax": lambda: torch.softmax(x, -1),
        "where": lambda: torch.where(x > y, x, y),
        "relu": lambda: torch.relu(x),
        "reshape": lambda: x.reshape(16),
        "transpose": lambda: x.T,
        "subscript": lambda: x[0],
        "slice": lambda: x[1:3, :2],
        "concatenate": lambda: torch.cat([x, y]),
        "cast": lambda: x.to(torch.float16),
        "gather": lambda: torch.index_select(x, 0, index),
    }
    return {name: microseconds(call) for name, call in calls.items()}


def jax_jit() -> dict[str, float]:
    """Cached calls of jax.jit, waiting for the result as ours does."""
    import jax
    import jax.numpy as jnp

    x, y = jnp.ones((4, 4)), jnp.ones((4, 4))
    one, two = jax.jit(lambda x: x + 1.0), jax.jit(lambda x, y: jnp.exp(x) * y + 1.0)
    return {
        "x + 1": microseconds(lambda: one(x).block_until_ready()),
        "exp(x) * y + 1": microseconds(lambda: two(x, y).block_until_ready()),
    }


if __name__ == "__main__":
    print(json.dumps({"torch": torch_eager(), "jax": jax_jit()}))
