"""Kernels that the tests of `tessera.triton` share."""

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < n
    tl.store(out + at, tl.load(x + at, mask=keep) + tl.load(y + at, mask=keep), mask=keep)


@triton.jit
def matmul(a, b, c, M, N, K, stride_am, stride_bk, stride_cm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * stride_am + k, mask=(rows[:, None] < M) & (k < K), other=0.0)
        right = tl.load(b + k[:, None] * stride_bk + cols, mask=(k[:, None] < K) & (cols < N), other=0.0)
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * stride_cm + cols, total, mask=(rows[:, None] < M) & (cols < N))


@triton.jit
def normalise(x, BLOCK: tl.constexpr):
    """In place; threads hold copies of elements, and the lanes of a sum round differently (x * x is fused)."""
    at = tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * BLOCK + at)
    scale = tl.rsqrt(tl.sum(value * value))
    value = tl.load(x + tl.program_id(0) * BLOCK + at)
    tl.store(x + tl.program_id(0) * BLOCK + at, value * scale)
