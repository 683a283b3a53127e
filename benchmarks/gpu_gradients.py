"""Forward and backward through kernels of the standard library, each as one compiled program, against PyTorch.

The backward kernels are those that reverse mode derives from the forward ones. PyTorch runs its own: eager operations
with autograd, and FlashAttention-2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import tessera as ts
from benchmarks.gpu import bound, compiled, in_pairs, result
from tessera import stdlib
from tessera.core.types import bf16

ROWS, COLUMNS = 8192, 4096
HEADS = (2, 16, 2048, 64)
DTYPES = {torch.float32: np.float32, torch.bfloat16: bf16.numpy}


def measure() -> list[dict[str, Any]]:
    """Every figure."""
    return list(_all())


def _all() -> Iterator[dict[str, Any]]:
    matrix, row = torch.randn(ROWS, COLUMNS, device="cuda"), torch.randn(COLUMNS, device="cuda")
    traffic = 5 * matrix.nbytes  # x twice, the result, its cotangent, and the gradient
    yield _one("softmax f32", stdlib.stable_softmax, lambda x: F.softmax(x, -1), [matrix], traffic)
    ours = lambda x, w, b: stdlib.efficient_layernorm(x, w, b)  # noqa: E731
    yield _one("layer norm f32", ours, lambda x, w, b: F.layer_norm(x, (COLUMNS,), w, b), [matrix, row, row], traffic)
    for causal in (False, True):
        q, k, v = (torch.randn(HEADS, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
        operations = 4 * 3.5 * HEADS[0] * HEADS[1] * HEADS[2] ** 2 * HEADS[3] / (2 if causal else 1)
        own = lambda q, k, v, c=causal: stdlib.flash_attention(q, k, v, causal=c)  # noqa: E731
        peer = lambda q, k, v, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c)  # noqa: E731
        name = f"attention bf16 {'causal' if causal else 'full'}"
        yield _one(name, own, peer, [q, k, v], operations=operations)


def _one(
    name: str, ours: Callable[..., Any], peer: Callable[..., Any], tensors: list[torch.Tensor], traffic: float = 0,
    operations: float = 0,
) -> dict[str, Any]:  # fmt: skip
    leaves = [t.clone().requires_grad_() for t in tensors]
    cotangent = torch.randn_like(peer(*tensors))

    def theirs() -> Any:
        return torch.autograd.grad(peer(*leaves), leaves, cotangent)

    def both(*arguments: Any) -> Any:
        *args, g = arguments
        out, pull = ts.vjp(ours, *args)
        return out, *pull(g)

    arrays = [np.zeros(t.shape, DTYPES[t.dtype]) for t in (*tensors, cotangent)]
    found = [torch.empty_like(t) for t in (cotangent, *tensors)]
    run = bound(compiled(ts.jit(both), arrays), *tensors, cotangent, *found)
    run()
    want = theirs()
    error = max(
        ((f.float() - w.float()).norm() / w.float().norm()).item() for f, w in zip(found[1:], want, strict=True)
    )
    assert error < 2e-2, f"{name}: error {error}"
    times = in_pairs(run, {"PyTorch": theirs}, 5, 3)
    return {**result(name, times, bytes_moved=traffic, operations=operations), "error": error}
