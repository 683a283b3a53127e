"""Peers of the GPU benchmarks written in Triton: rows, an elementwise chain, and a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

PIECE = 1024  # elements of the chain that one program takes
BLOCKS = {"BM": 128, "BN": 256, "BK": 64}


@triton.jit
def softmax_rows(x, out, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64) * columns, tl.arange(0, BLOCK)
    inside = at < columns
    held = tl.load(x + row + at, mask=inside, other=-float("inf")).to(tl.float32)
    weights = tl.exp(held - tl.max(held, 0))
    tl.store(out + row + at, (weights / tl.sum(weights, 0)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_rows(x, weight, bias, out, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64) * columns, tl.arange(0, BLOCK)
    inside = at < columns
    held = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    apart = tl.where(inside, held - tl.sum(held, 0) / columns, 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, 0) / columns + 1e-5)
    w = tl.load(weight + at, mask=inside).to(tl.float32)
    b = tl.load(bias + at, mask=inside).to(tl.float32)
    tl.store(out + row + at, (apart * scale * w + b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_rows(x, weight, out, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64) * columns, tl.arange(0, BLOCK)
    inside = at < columns
    held = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(held * held, 0) / columns + 1e-5)
    w = tl.load(weight + at, mask=inside).to(tl.float32)
    tl.store(out + row + at, (held * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at).to(tl.float32), tl.load(y + at).to(tl.float32)
    tl.store(out + at, (libdevice.tanh(a) * b + a).to(out.dtype.element_ty))


@triton.jit
def added(x, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + tl.load(y + at))


@triton.jit
def product(a, b, out, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        deep = start + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * k + deep[None, :])
        total += tl.dot(left, tl.load(b + deep[:, None] * n + columns[None, :]))
    tl.store(out + rows[:, None] * n + columns[None, :], total.to(out.dtype.element_ty))


def rows(kernel: Any) -> Callable[..., Callable[[], Any]]:
    """A kernel over rows: given tensors and an output, what launches it; a row is held by one program."""

    def bind(*tensors: torch.Tensor) -> Callable[[], Any]:
        count, columns = tensors[0].shape
        warps = min(max(columns // 1024, 4), 32)
        block = triton.next_power_of_2(columns)
        return lambda: kernel[(count,)](*tensors, columns, BLOCK=block, num_warps=warps)

    return bind


def chain(*tensors: torch.Tensor) -> Callable[[], Any]:
    """The elementwise chain over tensors and an output."""
    return lambda: gated[(tensors[0].numel() // PIECE,)](*tensors, BLOCK=PIECE)


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Any:
    """The product, compiled if it is not."""
    (m, k), n = a.shape, b.shape[1]
    return product[(m // BLOCKS["BM"], n // BLOCKS["BN"])](a, b, out, m, n, k, **BLOCKS, num_warps=8, num_stages=3)
