"""The MiniLM sentence encoder (Wang et al. 2020; Reimers and Gurevych 2019) in Tessera's own ops."""

from __future__ import annotations

from typing import Any

import numpy as np

import tessera as ts
from examples.minilm import reference
from examples.minilm.text import encode as tokenize
from examples.minilm.text import lines
from examples.minilm.weights import config, load, nested

HEADS = 12
EPS = 1e-12
HIDDEN = -10000.0  # added to the scores of padding, as BERT does


def norm(x: ts.Tensor, part: dict[str, Any]) -> ts.Tensor:
    """Layer normalisation over the features."""
    return ts.layer_norm(x, weight=part["weight"], bias=part["bias"], eps=EPS)


def dense(x: ts.Tensor, part: dict[str, Any]) -> ts.Tensor:
    """x [B, S, in] times weight [in, out], plus bias."""
    return ts.linear(x, part["weight"], part["bias"])


def heads(x: ts.Tensor) -> ts.Tensor:
    """[B, S, D] to [B, HEADS, S, D / HEADS]."""
    batch, length, size = x.shape
    return x.reshape(batch, length, HEADS, size // HEADS).permute(0, 2, 1, 3)


def attention(x: ts.Tensor, bias: ts.Tensor, layer: dict[str, Any]) -> ts.Tensor:
    """Multi-head self-attention with a padding mask, and its output projection."""
    q, k, v = (heads(dense(x, layer[name])) for name in ("query", "key", "value"))
    mixed = ts.scaled_dot_product_attention(q, k, v, bias)
    return dense(mixed.permute(0, 2, 1, 3).reshape(*x.shape), layer["output"])


def block(x: ts.Tensor, bias: ts.Tensor, layer: dict[str, Any]) -> ts.Tensor:
    """One encoder layer: attention and a feed-forward network, each with a residual and a norm after."""
    x = norm(x + attention(x, bias, layer), layer["norm1"])
    return norm(x + dense(ts.gelu(dense(x, layer["up"])), layer["down"]), layer["norm2"])


def pool(x: ts.Tensor, mask: ts.Tensor) -> ts.Tensor:
    """The mean over real tokens, scaled to unit length."""
    weight = ts.expand_dims(mask.to(ts.f32), -1)
    mean = ts.sum(x.to(ts.f32) * weight, axis=1) / ts.maximum(ts.sum(weight, axis=1), 1e-9)
    return mean * ts.rsqrt(ts.maximum(ts.sum(mean * mean, axis=-1, keepdims=True), 1e-24))


def example_inputs(rng: np.random.Generator) -> dict[str, Any]:
    """The weights, and eight real sentences of up to 64 tokens."""
    ids, mask = tokenize(lines("sentences.txt")[:8], 64)
    return {"params": parameters(), "ids": ids, "mask": mask}


def parameters() -> dict[str, Any]:
    """The pretrained weights as a pytree."""
    assert config().heads == HEADS and config().eps == EPS
    return nested(load())


def expected(params: dict[str, Any], ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The same encoder in NumPy."""
    return reference.encode(params, ids, mask)


@ts.example(example_inputs, expected, weights=("params",))
@ts.jit
def encode(params: Any, ids: ts.Tensor["B", "S", ts.int32], mask: ts.Tensor["B", "S", ts.int32]) -> ts.Tensor:
    """Sentence embeddings [B, 384] of unit length, from token ids and their mask (1 for real tokens).

    The encoder works in the type of its weights; the embeddings are f32.
    """
    tables = params["embeddings"]
    places = tables["position"][: ids.shape[1]]
    x = ts.embedding(tables["word"], ids) + places + tables["type"][0]
    x = norm(x, tables["norm"])
    bias = ts.reshape((1.0 - mask.to(x.dtype)) * HIDDEN, shape=(ids.shape[0], 1, 1, ids.shape[1]))
    for layer in params["layers"]:
        x = block(x, bias, layer)
    return pool(x, mask)
