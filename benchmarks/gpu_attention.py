"""Attention forward by the standard library's kernel against cuDNN, FlashAttention-2 and a Triton kernel (bf16).

The last is what PyTorch's flex_attention compiles to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.gpu import bound, compiled, in_pairs, result
from tessera.core.types import bf16
from tessera.stdlib.attention import attend

TOKENS, WIDTH = 16384, 2048
LENGTHS = (2048, 4096, 8192, 16384)
BLOCK = (128, 128)
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}


def measure() -> list[dict[str, Any]]:
    """Every figure."""
    return list(_all())


def _all() -> Iterator[dict[str, Any]]:
    for depth in (64, 128):
        for causal in (False, True):
            for length in LENGTHS:
                yield _one(depth, length, causal)


def _one(depth: int, length: int, causal: bool) -> dict[str, Any]:
    shape = (TOKENS // length, WIDTH // depth, length, depth)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    out = torch.empty_like(q)
    peers = {name: _peer(backend, q, k, v, causal) for name, backend in PEERS.items()}
    want = peers["cuDNN"]().float()
    operations = 4 * shape[0] * shape[1] * length**2 * depth / (2 if causal else 1)
    ours = bound(_compiled(shape, causal, BLOCK), q, k, v, out)
    out.fill_(float("nan"))
    ours()
    error = ((out.float() - want).norm() / want.norm()).item()
    assert error < 1e-2, f"attention {depth} {length} {causal}: error {error}"
    times = in_pairs(ours, {**peers, "Triton": _triton(q, k, v, causal)}, 5, 3)
    name = f"attention {depth} {length} {'causal' if causal else 'full'}"
    return {**result(name, times, operations=operations), "block": BLOCK, "error": error}


def _triton(q: Any, k: Any, v: Any, causal: bool) -> Callable[[], torch.Tensor]:
    torch._dynamo.reset()  # a kernel for each shape
    attend = torch.compile(flex_attention, dynamic=False)
    length = q.shape[2]
    seen = create_block_mask(_before, None, None, length, length, device="cuda") if causal else None
    return lambda: attend(q, k, v, block_mask=seen)


def _before(batch: Any, head: Any, row: Any, column: Any) -> Any:
    return column <= row


def _peer(backend: SDPBackend, q: Any, k: Any, v: Any, causal: bool) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def _compiled(shape: tuple[int, ...], causal: bool, block: tuple[int, int]) -> Any:
    array = np.lib.stride_tricks.as_strided(np.zeros(1, bf16.numpy), shape, (0,) * 4)
    arguments: dict[str, Any] = {"q": array, "k": array, "v": array, "mask": None, "lengths": None, "out": array}
    arguments |= {"causal": causal, "scale": shape[3] ** -0.5, "BM": block[0], "BN": block[1], "narrow": True}
    return compiled(attend, arguments, (*shape[:2], -(-shape[2] // block[0])))
