"""What the passes that fetch ahead are worth: each loop with and without them, and the peer where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import tessera as ts
from benchmarks.gpu import BYTE, bound, in_pairs, result
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.core.types import bf16, int8
from tessera.frontend.kernel import kernel
from tessera.runtime.program import prepare
from tessera.stdlib.attention import attend

WARPS = ((128, 128, 32), (128, 128, 64), (128, 256, 64))  # blocks for the tensor cores of a warp
GROUPS = (128, 256, 64)  # and of a warp group


@kernel
def product(a, b, out, *, BM: int, BN: int, BK: int, left: bool = False, right: bool = False):
    """out = a b; `left` and `right` say which side is given turned around."""
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), a.type.accumulate)
    for k in tile.range(0, a.shape[0] if left else a.shape[1], BK):
        if left:
            x = tile.load(a[k : k + BK, m : m + BM], edge="clip").T
        else:
            x = tile.load(a[m : m + BM, k : k + BK], edge="clip")
        if right:
            y = tile.load(b[n : n + BN, k : k + BK], edge="clip").T
        else:
            y = tile.load(b[k : k + BK, n : n + BN], edge="clip")
        acc += tile.dot(x, y)
    tile.store(out[m : m + BM, n : n + BN], tile.cast(acc, out.dtype), edge="clip")


def measure() -> list[dict[str, Any]]:
    """Every figure; the architecture is that of the text, the GPU the one at hand."""
    return [*_copied(), *_turned(), *_clusters(), *_attention()]


def _compiled(entry: Any, arguments: Any, grid: Any, arch: str, **schedule: Any) -> Any:
    chosen = entry.with_schedule(ts.Schedule(**schedule)) if schedule else entry
    return BACKEND.runtime(BACKEND.emit(prepare(chosen, arguments, "ptx", grid).levels["tile"], {"arch": arch}))


def _like(tensor: torch.Tensor) -> np.ndarray:
    """An array of a tensor's shape and type that takes no memory."""
    element = {torch.bfloat16: bf16.numpy, torch.int8: int8.numpy, torch.int32: np.int32}[tensor.dtype]
    return np.lib.stride_tricks.as_strided(np.zeros(1, element), tuple(tensor.shape), (0,) * tensor.ndim)


def _product(
    tensors: list[torch.Tensor], block: tuple[int, ...], arch: str, left: bool = False, right: bool = False, **how: Any
) -> Any:
    a, b, out = (_like(t) for t in tensors)
    given = {"a": a, "b": b, "out": out, **dict(zip(("BM", "BN", "BK"), block, strict=True))}
    grid = (-(-out.shape[0] // block[0]), -(-out.shape[1] // block[1]))
    run = bound(_compiled(product, {**given, "left": left, "right": right}, grid, arch, **how), *tensors)
    run()
    return run


def _sides(m: int, n: int, k: int) -> list[torch.Tensor]:
    random = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n))]
    return [*random, torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)]


def _checked(out: torch.Tensor, want: torch.Tensor) -> float:
    error = ((out.float() - want.float()).norm() / want.float().norm()).item()
    assert error < 6e-3, f"error {error}"
    return error


def _copied() -> Iterator[dict[str, Any]]:
    """cp.async on text for sm_80, against the same loop without it, and cuBLAS; odd rows through registers."""
    for size in (4096, 8192):
        sides = _sides(size, size, size)
        for block in WARPS:
            yield _against(f"sm_80 {size}³", sides, block, "sm_80", size > 4096)
    yield _against("sm_90a 1000 x 777 x 333", _sides(1000, 777, 333), (64, 64, 32), "sm_90a", False)
    whole = [torch.randint(-100, 100, (4096, 4096), device="cuda", dtype=torch.int8) for _ in range(2)]
    sides = [*whole, torch.zeros(4096, 4096, device="cuda", dtype=torch.int32)]
    runs = [_product(sides, (128, 128, 128), "sm_80", right=True, stages=n) for n in (2, 1)]
    times = in_pairs(runs[0], {"nothing ahead": runs[1], "cuBLAS": lambda: torch._int_mm(whole[0], whole[1].T)})
    yield result("int8 sm_80 4096³ by 128x128x128", times, operations=2 * 4096**3, peak=BYTE)


def _against(name: str, sides: list[torch.Tensor], block: tuple[int, ...], arch: str, large: bool) -> dict[str, Any]:
    a, b, out = sides
    want = a @ b
    runs = [_product(sides, block, arch), _product(sides, block, arch, stages=1)]
    out.fill_(float("nan"))
    runs[0]()
    error, peer = _checked(out, want), torch.empty_like(out)
    peers = {"nothing ahead": runs[1], "cuBLAS": lambda: torch.mm(a, b, out=peer)}
    times = in_pairs(runs[0], peers, 5, 2 if large else 5)
    found = result(f"{name} by {'x'.join(map(str, block))}", times, operations=2 * a.numel() * b.shape[1])
    return {**found, "error": error}


def _turned() -> Iterator[dict[str, Any]]:
    """Sides given turned around, fetched by tensor maps."""
    for size in (4096, 8192):
        a, b, out = _sides(size, size, size)
        for right in (False, True):
            run = _product([a, b, out], GROUPS, "sm_90a", left=True, right=right)
            x, y, peer = a.T, b.T if right else b, torch.empty_like(out)
            error = _checked(out, x @ y)
            times = in_pairs(run, {"cuBLAS": lambda x=x, y=y, peer=peer: torch.mm(x, y, out=peer)}, 7, 3)
            name = f"{size}³, left{' and right' if right else ''} turned"
            yield {**result(name, times, operations=2 * size**3), "error": error}


def _clusters() -> Iterator[dict[str, Any]]:
    """Multicast in clusters of two and four programs against none."""
    for size in (2048, 4096, 8192):
        sides = _sides(size, size, size)
        for cluster in (2, 4):
            runs = [_product(sides, GROUPS, "sm_90a", cluster=n) for n in (cluster, 1)]
            times = in_pairs(runs[0], {"no cluster": runs[1]}, 7, 3)
            yield result(f"{size}³ in clusters of {cluster}", times, operations=2 * size**3)


def _attention() -> Iterator[dict[str, Any]]:
    """Attention by the tensor cores of a warp, keys and values by cp.async."""
    for depth in (64, 128):
        q, k, v = (torch.randn(2, 16, 4096, depth, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        out = torch.empty_like(q)
        given = {"q": _like(q), "k": _like(k), "v": _like(v), "mask": None, "lengths": None, "out": _like(out)}
        given |= {"causal": False, "scale": depth**-0.5, "BM": 64, "BN": 64, "narrow": True}
        programs = [_compiled(attend, given, (2, 16, 64), "sm_80", **how) for how in ({}, {"stages": 1})]
        runs = [bound(each, q, k, v, out) for each in programs]
        runs[0]()
        error = _checked(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
        times = in_pairs(runs[0], {"nothing ahead": runs[1]}, 7, 3)
        yield {**result(f"attention sm_80 depth {depth}", times, operations=4 * 32 * 4096**2 * depth), "error": error}
