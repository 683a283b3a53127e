"""Matrix products by a kernel in the kernel language against cuBLAS, with the best of a few block sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import tessera as ts
from benchmarks.gpu import bound, compiled, in_pairs, result
from tessera import tile
from tessera.core.types import bf16
from tessera.frontend.kernel import kernel

SIZES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (16384, 16384, 16384),
         (16, 4096, 4096), (4096, 64, 4096), (1000, 777, 333))  # fmt: skip
BLOCKS = ((128, 256, 64), (128, 128, 64), (64, 256, 64), (64, 128, 64), (64, 64, 64))


@kernel
def product(a, b, out, *, BM: int = 128, BN: int = 256, BK: int = 64):
    """out = a b for a [M, K] and b [K, N]."""
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), ts.f32)
    for k in tile.range(0, a.shape[1], BK):
        left = tile.load(a[m : m + BM, k : k + BK], edge="clip")
        acc += tile.dot(left, tile.load(b[k : k + BK, n : n + BN], edge="clip"))
    tile.store(out[m : m + BM, n : n + BN], tile.cast(acc, out.dtype), edge="clip")


@ts.jit
def fused(x, weight, bias):
    """A layer of a network: its bias and gelu follow the product in one kernel."""
    return ts.gelu(x @ weight + bias, approximate="tanh")


def measure() -> list[dict[str, Any]]:
    """Every figure."""
    return list(_all())


def _all() -> Iterator[dict[str, Any]]:
    for m, n, k in SIZES:
        yield _one(m, n, k)
    yield _fused(8192, 8192, 2048)


def _fused(m: int, n: int, k: int) -> dict[str, Any]:
    """Product, bias and gelu against cuBLASLt's fused epilogue."""
    x, w, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n), (n,)))
    w *= k**-0.5
    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    program = compiled(fused, [_like(t.shape) for t in (x, w, b)])
    ours = bound(program, x, w, b, out)
    ours()
    want = torch.nn.functional.gelu((x @ w).float() + b.float(), approximate="tanh")
    error = ((out.float() - want).norm() / want.norm()).item()
    assert error < 1e-2, f"fused: error {error}"
    times = in_pairs(ours, {"cuBLASLt": lambda: torch._addmm_activation(b, x, w, use_gelu=True)}, 7, 5)
    return {**result(f"bf16 {m} x {n} x {k} bias gelu", times, operations=2 * m * n * k), "error": error}


def _like(shape: Any) -> np.ndarray:
    """An array of bf16 of this shape that takes no memory."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, bf16.numpy), tuple(shape), (0,) * len(shape))


def _one(m: int, n: int, k: int) -> dict[str, Any]:
    a, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n)))
    out, peer = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16), a.new_empty(m, n)
    want = (a @ b).float()
    rounds, each = (5, 3) if m * n * k > 1 << 38 else (9, 10)
    found = []
    for block in _fitting(m, n):
        ours = bound(compiled_product(m, n, k, block), a, b, out)
        out.fill_(float("nan"))
        ours()
        error = ((out.float() - want).norm() / want.norm()).item()
        assert error < 6e-3, f"{m} {n} {k} by {block}: error {error}"
        times = in_pairs(ours, {"cuBLAS": lambda: torch.mm(a, b, out=peer)}, rounds, each)
        name = f"bf16 {m} x {n} x {k} by {'x'.join(map(str, block))}"
        found.append({**result(name, times, operations=2 * m * n * k), "block": block, "error": error})
    return max(found, key=lambda each: each["teraflops"])


def _fitting(m: int, n: int) -> list[tuple[int, int, int]]:
    """Block sizes worth a try."""
    large = m * n >= 1 << 24
    return [b for b in BLOCKS if b[0] < 2 * m + 64 and b[1] < 2 * n + 64][: 2 if large else len(BLOCKS)]


def compiled_product(m: int, n: int, k: int, block: tuple[int, int, int]) -> Any:
    """The kernel for these sizes, compiled."""
    shapes = ((m, k), (k, n), (m, n))
    arrays = [_like(s) for s in shapes]
    constants = dict(zip(("BM", "BN", "BK"), block, strict=True))
    named = dict(zip(("a", "b", "out"), arrays, strict=True))
    return compiled(product, {**named, **constants}, (-(-m // block[0]), -(-n // block[1])))
