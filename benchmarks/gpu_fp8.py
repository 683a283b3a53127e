"""Products of 8-bit floats by a kernel in the kernel language against cuBLASLt, with and without its fast sums.

Sums within the tensor cores keep fewer bits than f32. The target adds each round's sums in f32; cuBLASLt does so unless
it is allowed not to ("fast"), which this target has no counterpart of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import BYTE, bound, compiled, in_pairs, result
from tessera import tile
from tessera.core.types import bf16, f32, fp8_e4m3
from tessera.frontend.kernel import kernel

SIZES = (4096, 8192)
BLOCKS = ((128, 256, 128), (128, 128, 128))


@kernel
def product(a, b, out, *, BM: int = 128, BN: int = 128, BK: int = 128):
    """out = a b^T for a [M, K] and b [N, K]."""
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), f32)
    for k in tile.range(0, a.shape[1], BK):
        left = tile.load(a[m : m + BM, k : k + BK], edge="clip")
        acc += tile.dot(left, tile.transpose(tile.load(b[n : n + BN, k : k + BK], edge="clip")))
    tile.store(out[m : m + BM, n : n + BN], tile.cast(acc, out.dtype), edge="clip")


def measure() -> list[dict[str, Any]]:
    """Every figure."""
    return [_one(n) for n in SIZES]


def _one(n: int) -> dict[str, Any]:
    a, b = (torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    out = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
    want = a.float() @ b.float().T
    peers = {"cuBLASLt": _peer(a, b, fast=False), "cuBLASLt fast": _peer(a, b, fast=True)}
    found = []
    for block in BLOCKS:
        ours = bound(_compiled(n, block), a, b, out)
        out.fill_(float("nan"))
        ours()
        error = ((out.float() - want).norm() / want.norm()).item()
        assert error < 6e-3, f"{n} by {block}: error {error}"
        name = f"e4m3 {n} x {n} x {n} by {'x'.join(map(str, block))}"
        times = in_pairs(ours, peers)
        found.append({**result(name, times, operations=2 * n**3, peak=BYTE), "block": block, "error": error})
    return max(found, key=lambda each: each["teraflops"])


def _peer(a: torch.Tensor, b: torch.Tensor, fast: bool) -> Callable[[], Any]:
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _compiled(n: int, block: tuple[int, int, int]) -> Any:
    arrays = [np.lib.stride_tricks.as_strided(np.zeros(1, d.numpy), (n, n), (0, 0)) for d in (fp8_e4m3, fp8_e4m3, bf16)]
    named = dict(zip(("a", "b", "out"), arrays, strict=True))
    constants = dict(zip(("BM", "BN", "BK"), block, strict=True))
    return compiled(product, {**named, **constants}, (n // block[0], n // block[1]))
