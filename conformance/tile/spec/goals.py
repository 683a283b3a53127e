"""The kernels of the goals: flash attention, a verified score, schedules that inherit. What is open is completed."""

from __future__ import annotations

import math

import tessera
from tessera import Schedule, Tile, bf16, f32, kernel, tile

INF = math.inf


def dropout_in_kernel(weights, p):
    return tile.dropout(weights, p, seed=7)


@kernel.autotune(
    space=dict(BM=[16, 8], BN=[32, 16], BD=[8], warps=[4, 8], stages=[2, 3], vector=[4, 8]),
    metric="latency_ms", budget_ms=180, cache="~/.sched",
)  # fmt: skip
def flash_attention(
    q: Tile["BH", "S", "D"], k: Tile["BH", "T", "D"], v: Tile["BH", "T", "D"], *, dropout: float, causal: bool  # noqa: F821
):  # fmt: skip
    T = tile.context()
    Qb = tile.load(q, rows=T.m, cols=T.d, vector=T.vector, prefetch=2)
    acc = tile.zeros((T.m, T.d), f32)
    m = tile.full((T.m,), -INF)
    l = tile.zeros((T.m,), f32)  # noqa: E741
    for nblk in tile.range_n(k.shape, T.n, prefetch=2):
        Kb = tile.load(k, nblk, cols=T.d, vector=T.vector)
        Vb = tile.load(v, nblk, cols=T.d, vector=T.vector)
        S = tile.dot(Qb, tile.transpose(Kb)) * tile.rsqrt(float(T.d))
        if causal:
            tile.mask_causal(S, tile.row_index(), tile.col_index(nblk))
        P, m_c, l_c = tile.softmax_online(S)
        if dropout:
            P = dropout_in_kernel(P, p=dropout)
        acc, m, l = tile.softmax_accumulate(acc, m, l, P, Vb, m_c, l_c)  # noqa: E741
    return tile.cast(acc / l[:, None], bf16)


@kernel.auto
def attention_score(q: Tile["S", "D"], k: Tile["T", "D"], d: f32):  # noqa: F821
    # Verification ensures no overflow/underflow: tests/tools/test_verify.py
    return tile.dot(q, k.T) / tile.sqrt(d)


# Define base schedule
base_schedule = Schedule(block=(128, 128), warps=8, stages=3)


def scores(q, k, out, BM, BN):
    i, j = tile.program_id(0) * BM, tile.program_id(1) * BN
    block = tile.dot(tile.load(q[i : i + BM, :], edge="clip"), tile.load(k[j : j + BN, :], edge="clip").T)
    tile.store(out[i : i + BM, j : j + BN], block, edge="clip")


# Variations inherit and override
@kernel.schedule(base_schedule.with_block(64, 64))
def small_attention(q, k, out, *, BM: int, BN: int):
    scores(q, k, out, BM, BN)


@kernel.schedule(base_schedule.with_warps(4))
def memory_limited_attention(q, k, out, *, BM: int, BN: int):
    scores(q, k, out, BM, BN)


assert tessera.kernel is kernel
