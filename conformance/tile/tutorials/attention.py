"""Fused attention forward and backward (Dao 2023), without stored scores: forward saves the logsumexp of each row."""

from __future__ import annotations

import math

import tessera as ts
from tessera import tile


@ts.kernel
def forward(q, k, v, out, lse, *, causal: bool, scale: float, BM: int, BN: int):
    """out = softmax(q kᵀ scale) v for [H, S, D], on the grid (H, S / BM); lse [H, S] is the log of each row's sum."""
    head, first = tile.program_id(0), tile.program_id(1) * BM
    rows = first + tile.arange(0, BM)
    queries = q[head, first : first + BM, :]
    acc, m, l = tile.zeros((BM, q.shape[2])), tile.full((BM,), -math.inf), tile.zeros((BM,))
    last = first + BM if causal else k.shape[1]
    for start in tile.range(0, last, BN):
        scores = tile.dot(queries, tile.transpose(k[head, start : start + BN, :])) * scale
        if causal:
            scores = tile.mask_causal(scores, rows, start + tile.arange(0, BN))
        p, m_block, l_block = tile.softmax_online(scores)
        acc, m, l = tile.softmax_accumulate(acc, m, l, p, v[head, start : start + BN, :], m_block, l_block)
    out[head, first : first + BM, :] = tile.cast(acc / l[:, None], out.dtype)
    lse[head, first : first + BM] = m + tile.log(l)


@ts.kernel
def row_sums(out, grad, delta, *, BM: int):
    """delta [H, S]: the sum of out times its gradient along each row."""
    head, first = tile.program_id(0), tile.program_id(1) * BM
    block = tile.cast(out[head, first : first + BM, :], ts.f32) * tile.cast(grad[head, first : first + BM, :], ts.f32)
    delta[head, first : first + BM] = tile.sum(block, axis=-1)


def weights(queries, keys, rows, cols, logs, causal, scale):
    """The block of softmax weights, recomputed from the logsumexp of its rows."""
    scores = tile.dot(queries, tile.transpose(keys)) * scale
    if causal:
        scores = tile.mask_causal(scores, rows, cols)
    return tile.exp(scores - logs[:, None])


@ts.kernel
def keys_backward(q, k, v, grad, lse, delta, dk, dv, *, causal: bool, scale: float, BM: int, BN: int):
    """dk and dv of a block of keys, summed over the blocks of queries that attend to it."""
    head, first = tile.program_id(0), tile.program_id(1) * BN
    cols, keys, values = first + tile.arange(0, BN), k[head, first : first + BN, :], v[head, first : first + BN, :]
    dk_acc, dv_acc = tile.zeros((BN, q.shape[2])), tile.zeros((BN, q.shape[2]))
    begin = first // BM * BM if causal else 0
    for start in tile.range(begin, q.shape[1], BM):
        queries, g = q[head, start : start + BM, :], grad[head, start : start + BM, :]
        rows = start + tile.arange(0, BM)
        p = weights(queries, keys, rows, cols, lse[head, start : start + BM], causal, scale)
        dv_acc += tile.dot(tile.transpose(p.to(g.dtype)), g)
        dp = tile.dot(g, tile.transpose(values))
        ds = p * (dp - tile.load(delta[head, start : start + BM])[:, None]) * scale
        dk_acc += tile.dot(tile.transpose(ds.to(queries.dtype)), queries)
    dk[head, first : first + BN, :] = tile.cast(dk_acc, dk.dtype)
    dv[head, first : first + BN, :] = tile.cast(dv_acc, dv.dtype)


@ts.kernel
def queries_backward(q, k, v, grad, lse, delta, dq, *, causal: bool, scale: float, BM: int, BN: int):
    """dq of a block of queries, summed over the blocks of keys that it attends to."""
    head, first = tile.program_id(0), tile.program_id(1) * BM
    rows, queries, g = first + tile.arange(0, BM), q[head, first : first + BM, :], grad[head, first : first + BM, :]
    logs, sums = tile.load(lse[head, first : first + BM]), tile.load(delta[head, first : first + BM])
    acc = tile.zeros((BM, q.shape[2]))
    last = first + BM if causal else k.shape[1]
    for start in tile.range(0, last, BN):
        keys, values = k[head, start : start + BN, :], v[head, start : start + BN, :]
        p = weights(queries, keys, rows, start + tile.arange(0, BN), logs, causal, scale)
        ds = p * (tile.dot(g, tile.transpose(values)) - sums[:, None]) * scale
        acc += tile.dot(ds.to(keys.dtype), keys)
    dq[head, first : first + BM, :] = tile.cast(acc, dq.dtype)
