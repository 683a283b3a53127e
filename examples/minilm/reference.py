"""A reference MiniLM encoder in NumPy, in float64 by default."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

HEADS = 12
EPS = 1e-12
_STEP = 1.0 / 1024.0
_NODES = np.arange(-6.0, 6.0 + _STEP / 2, _STEP)
_ERF = np.array([math.erf(x) for x in _NODES])
_SLOPE = 2.0 / math.sqrt(math.pi) * np.exp(-_NODES * _NODES)


def erf(x: np.ndarray) -> np.ndarray:
    """The error function: math.erf at a grid of nodes plus three Taylor terms, right to about 1e-14.

    >>> abs(float(erf(np.array(0.7))) - math.erf(0.7)) < 1e-13
    True
    """
    clipped = np.clip(np.asarray(x, np.float64), -6.0, 6.0)
    index = np.rint((clipped + 6.0) / _STEP).astype(np.int32)
    node = _NODES[index]
    gap = clipped - node
    return _ERF[index] + _SLOPE[index] * gap * (1.0 - gap * (node - gap * (2.0 * node * node - 1.0) / 3.0))


def gelu(x: np.ndarray) -> np.ndarray:
    """The erf form of GELU, in x's own type."""
    return np.asarray(0.5 * x * (1.0 + erf(x * math.sqrt(0.5))), dtype=x.dtype)


def linear(x: np.ndarray, part: dict[str, np.ndarray]) -> np.ndarray:
    """x @ weight + bias, with the weight as [in, out]."""
    return np.asarray(x @ part["weight"] + part["bias"])


def layer_norm(x: np.ndarray, part: dict[str, np.ndarray]) -> np.ndarray:
    """Normalise the last axis, then scale and shift."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt(variance + EPS) * part["weight"] + part["bias"])


def attention(x: np.ndarray, bias: np.ndarray, layer: dict[str, Any]) -> np.ndarray:
    """Multi-head self-attention over [N, L, hidden]; `bias` [N, 1, 1, L] hides the padding."""
    n, length, hidden = x.shape

    def heads(name: str) -> np.ndarray:
        return linear(x, layer[name]).reshape(n, length, HEADS, -1).transpose(0, 2, 1, 3)

    query, key, value = heads("query"), heads("key"), heads("value")
    scores = query @ key.transpose(0, 1, 3, 2) / math.sqrt(hidden // HEADS) + bias
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = weights @ value / weights.sum(-1, keepdims=True)
    return linear(mixed.transpose(0, 2, 1, 3).reshape(n, length, hidden), layer["output"])


def block(x: np.ndarray, bias: np.ndarray, layer: dict[str, Any]) -> np.ndarray:
    """One post-norm transformer layer."""
    x = layer_norm(x + attention(x, bias, layer), layer["norm1"])
    return layer_norm(x + linear(gelu(linear(x, layer["up"])), layer["down"]), layer["norm2"])


def pool(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The mean over real tokens, scaled to length one."""
    weight = mask[:, :, None].astype(x.dtype)
    mean = (x * weight).sum(1) / np.maximum(weight.sum(1), 1e-9)
    return np.asarray(mean / np.maximum(np.linalg.norm(mean, axis=-1, keepdims=True), 1e-12))


def cast(tree: Any, dtype: Any) -> Any:
    """The pytree with every array in `dtype`."""
    if isinstance(tree, dict):
        return {name: cast(value, dtype) for name, value in tree.items()}
    if isinstance(tree, list):
        return [cast(value, dtype) for value in tree]
    return np.asarray(tree, dtype)


def encode(params: Any, ids: np.ndarray, mask: np.ndarray, dtype: Any = np.float64) -> np.ndarray:
    """Unit sentence embeddings [N, hidden] from `weights.nested(...)`, token ids and their mask."""
    tree = cast(params, dtype)
    table = tree["embeddings"]
    x = table["word"][ids] + table["position"][: ids.shape[1]] + table["type"][0]
    x = layer_norm(x, table["norm"])
    bias = np.where(mask[:, None, None, :] > 0, 0.0, np.finfo(np.float32).min).astype(dtype)
    for layer in tree["layers"]:
        x = block(x, bias, layer)
    return pool(x, mask)
