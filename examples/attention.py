"""Multi-head self-attention as a model function; it lowers through the flash kernel of the standard library."""

import numpy as np

import tessera as ts

HEADS = 4


def inputs(rng: np.random.Generator) -> dict:
    """Two sequences of 96 tokens with 64 features, and the four projections."""

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(8)

    return {
        "x": random(2, 96, 64) * 8,
        "wq": random(64, 64),
        "wk": random(64, 64),
        "wv": random(64, 64),
        "wo": random(64, 64),
    }


def reference(x, wq, wk, wv, wo):
    """The same in NumPy, in double precision."""
    x = x.astype(np.float64)
    q, k, v = (np.moveaxis((x @ w).reshape(*x.shape[:2], HEADS, -1), 2, 1) for w in (wq, wk, wv))
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = weights / weights.sum(-1, keepdims=True) @ v
    return np.moveaxis(mixed, 1, 2).reshape(x.shape) @ wo


def split(x: ts.Tensor) -> ts.Tensor:
    """[B, S, D] to [B, HEADS, S, D / HEADS]."""
    batch, length, size = x.shape
    return x.reshape(batch, length, HEADS, size // HEADS).permute(0, 2, 1, 3)


@ts.example(inputs, reference)
@ts.jit
def attention(x: ts.Tensor["B", "S", "D"], wq, wk, wv, wo):
    """Causal self-attention: softmax(q kᵀ / sqrt(d)) v, projected by wo."""
    q, k, v = split(x @ wq), split(x @ wk), split(x @ wv)
    mixed = ts.scaled_dot_product_attention(q, k, v, causal=True)
    return mixed.permute(0, 2, 1, 3).reshape(*x.shape) @ wo
