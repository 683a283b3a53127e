"""Causal attention in one pass over the keys, with online softmax (Dao et al. 2022)."""

import math

import numpy as np

import tessera as ts
from tessera import tile

BM, BN = 32, 32


def inputs(rng: np.random.Generator) -> dict:
    """Two batches of 3 heads, 100 tokens, 16 features."""
    q, k, v = rng.standard_normal((3, 2, 3, 100, 16), dtype=np.float32)
    return {"q": q, "k": k, "v": v, "out": np.zeros_like(q)}


def reference(q, k, v, out, causal=True):
    """The same in NumPy, in double precision, with all scores at once."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e @ v / e.sum(-1, keepdims=True)


@ts.example(inputs, reference, grid=lambda q, **_: (q.shape[0], q.shape[1], -(-q.shape[2] // BM)))
@ts.kernel
def flash_attention(
    q: ts.Tensor["B", "H", "S", "D"],
    k: ts.Tensor["B", "H", "T", "D"],
    v: ts.Tensor["B", "H", "T", "D"],
    out: ts.Tensor["B", "H", "S", "D"],
    *,
    causal: bool = True,
):
    """out = softmax(q kᵀ / sqrt(D)) v; `causal` hides later keys."""
    batch, head, first = tile.program_id(0), tile.program_id(1), tile.program_id(2) * BM
    rows = first + tile.arange(0, BM)
    queries = tile.load(q[batch, head, first : first + BM, :], edge="clip")
    acc, m, l = tile.zeros((BM, D)), tile.full((BM,), -math.inf), tile.zeros((BM,))

    last = min(first + BM, T) if causal else T
    for start in tile.range(0, last, BN):
        keys = tile.load(k[batch, head, start : start + BN, :], edge="clip")
        values = tile.load(v[batch, head, start : start + BN, :], edge="clip")
        cols = start + tile.arange(0, BN)
        scores = queries @ keys.T / math.sqrt(D)
        scores = tile.where(cols[None, :] < T, scores, -math.inf)
        if causal:
            scores = tile.mask_causal(scores, rows, cols)
        p, m_block, l_block = tile.softmax_online(scores)
        acc, m, l = tile.softmax_accumulate(acc, m, l, p, values, m_block, l_block)

    tile.store(out[batch, head, first : first + BM, :], acc / l[:, None], edge="clip")
