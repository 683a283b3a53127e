"""Matrix products: with a cache-friendly program order, grouped, and block-scaled."""

from __future__ import annotations

import tessera as ts
from tessera import tile


def leaky_relu(x):
    return tile.where(x >= 0, x, 0.01 * x)


@ts.kernel
def matmul(a, b, c, *, BM: int, BN: int, BK: int, GROUP: int, activate: bool = False):
    """c = a b, with programs ordered in groups of GROUP rows of blocks."""
    M, K = a.shape
    N = b.shape[1]
    rows, cols = -(-M // BM), -(-N // BN)
    pid = tile.program_id(0)
    band = pid // (GROUP * cols)
    first = band * GROUP
    size = tile.minimum(rows - first, GROUP)
    row = first + (pid % (GROUP * cols)) % size
    col = (pid % (GROUP * cols)) // size

    acc = tile.zeros((BM, BN), ts.f32)
    for k in tile.range(0, K, BK):
        left = tile.load(a[row * BM : row * BM + BM, k : k + BK], edge="clip")
        right = tile.load(b[k : k + BK, col * BN : col * BN + BN], edge="clip")
        acc = tile.mma(left, right, acc)
    if activate:
        acc = leaky_relu(acc)
    tile.store(c[row * BM : row * BM + BM, col * BN : col * BN + BN], tile.cast(acc, c.dtype), edge="clip")


@ts.kernel
def grouped_gemm(a, b, c, sizes, *, BM: int, BN: int, BK: int):
    """Several products of different sizes in one launch: a fixed number of programs processes the blocks of all.

    `a`, `b` and `c` hold the matrices one after the other, flat; `sizes` [G, 3] the M, N and K of each.
    """
    number, done = tile.program_id(0), 0
    a_at, b_at, c_at = 0, 0, 0
    for g in tile.range(0, sizes.shape[0]):
        M, N, K = sizes[g, 0], sizes[g, 1], sizes[g, 2]
        across = (N + BN - 1) // BN
        count = (M + BM - 1) // BM * across
        while number < done + count:
            block = number - done
            rows = block // across * BM + tile.arange(0, BM)
            cols = block % across * BN + tile.arange(0, BN)
            acc = tile.zeros((BM, BN), ts.f32)
            for k in tile.range(0, K, BK):
                inner = k + tile.arange(0, BK)
                within = (rows < M)[:, None] & (inner < K)[None, :]
                left = tile.load(a, a_at + rows[:, None] * K + inner[None, :], mask=within)
                within = (inner < K)[:, None] & (cols < N)[None, :]
                right = tile.load(b, b_at + inner[:, None] * N + cols[None, :], mask=within)
                acc = tile.mma(left, right, acc)
            within = (rows < M)[:, None] & (cols < N)[None, :]
            tile.store(c, c_at + rows[:, None] * N + cols[None, :], tile.cast(acc, c.dtype), mask=within)
            number += tile.num_programs(0)
        done += count
        a_at += M * K
        b_at += K * N
        c_at += M * N


@ts.kernel
def block_scaled(a, a_scale, b, b_scale, c, *, BM: int, BN: int, VEC: int):
    """c = a bᵀ where each group of VEC elements along K has its own scale, a power of two.

    a is [M, K] and b [N, K], of formats of 8 bits or fewer; the scales are uint8 [M, K / VEC] and [N, K / VEC]:
    the exponents plus 127.
    """
    i, j = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), ts.f32)
    for k in tile.range(0, a.shape[1] // VEC):
        left = tile.cast(a[i : i + BM, k * VEC : k * VEC + VEC], ts.f32)
        right = tile.cast(b[j : j + BN, k * VEC : k * VEC + VEC], ts.f32)
        left = left * power(a_scale[i : i + BM, k])[:, None]
        right = right * power(b_scale[j : j + BN, k])[:, None]
        acc = tile.mma(left, tile.transpose(right), acc)
    tile.store(c[i : i + BM, j : j + BN], tile.cast(acc, c.dtype))


def power(exponent):
    """Two to the power exponent - 127."""
    return tile.exp2(tile.cast(exponent, ts.f32) - 127.0)
