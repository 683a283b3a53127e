"""Decoder-only transformer: Llama, Qwen and GPT-2 as one function over a pytree of weights and a paged cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tessera.core.types import f32, int32
from tessera.ir.tensor import Tensor
from tessera.llm.config import DecoderConfig
from tessera.ops.tensor import nn
from tessera.ops.tensor.attention import scaled_dot_product_attention
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.contractions import dot
from tessera.ops.tensor.elementwise import cos, maximum, minimum, sin
from tessera.ops.tensor.shape import concatenate, embedding, expand_dims, gather, iota, permute, reshape, stack
from tessera.stdlib.paged_attention import append_pages, paged_attention
from tessera.stdlib.paged_decoding import decode_position
from tessera.stdlib.quantised import QuantisedMatrix, quantised_matmul, take_rows
from tessera.stdlib.routine import is_for_gpu


class PagedCache(NamedTuple):
    """The keys and values of all layers, a pytree: for each layer [pages, heads, page size, head size]."""

    keys: list[Any]
    values: list[Any]


class Batch(NamedTuple):
    """The requests of a step: `tokens` [B, S] of which count[b] count, after past[b] that the cache has.

    `table` [B, T] has the pages of each request. `fresh`: the cache has nothing of any request.
    """

    tokens: Any
    table: Any
    past: Any
    count: Any
    fresh: bool = False


def multiply(x: Tensor, part: dict[str, Any]) -> Tensor:
    """x Wᵀ plus the bias if there is one; the matrix [out, in] may be quantised, or of a narrower float type."""
    weight = part["weight"]
    if isinstance(weight, QuantisedMatrix):
        y = quantised_matmul(cast(x, dtype=f32), weight)
    else:
        y = dot(cast(x, dtype=weight.dtype), permute(weight, axes=(1, 0)), dtype=f32)
    return y + cast(part["bias"], dtype=f32) if "bias" in part else y


def normalise(config: DecoderConfig, x: Tensor, part: dict[str, Any]) -> Tensor:
    """The norm of the configuration over the features."""
    weight = cast(part["weight"], dtype=f32)
    if config.norm == "layer":
        return nn.layer_norm(x, weight=weight, bias=cast(part["bias"], dtype=f32), eps=config.eps)
    return nn.rms_norm(x, weight=weight, eps=config.eps)


def compute_angles(config: DecoderConfig, places: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles at integer positions: [..., head_size / 2]."""
    powers = np.arange(0, config.head_size, 2, dtype=np.float32) / np.float32(config.head_size)
    frequency = np.float32(1) / np.float32(config.rope_base) ** powers
    angle = expand_dims(cast(places, dtype=f32), -1) * Tensor(frequency)
    return cos(angle), sin(angle)


def rotate(config: DecoderConfig, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions (Su et al. 2021) of heads x [B, S, H, D]; the angles are [B, S, D / 2]."""
    c, s = (expand_dims(a, 2) for a in angles)
    half = config.head_size // 2
    if config.rotary == "halves":
        a, b = x[..., :half], x[..., half:]
        return concatenate([a * c - b * s, b * c + a * s], axis=-1)
    pairs = reshape(x, shape=(*x.shape[:-1], half, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    return reshape(stack([a * c - b * s, b * c + a * s], axis=-1), shape=x.shape)


def project_heads(config: DecoderConfig, x: Tensor, layer: dict[str, Any], lead: tuple[int, int]) -> list[Tensor]:
    """Queries, keys and values of normalised rows x: [B, S, heads, head_size] each; `lead` is (B, S)."""
    counts = (config.heads, config.kv_heads, config.kv_heads)
    if "qkv" in layer:
        whole = _project_all_heads(config, x, layer, lead)
        first, last = config.heads, config.heads + config.kv_heads
        return [whole[:, :, :first], whole[:, :, first:last], whole[:, :, last:]]
    return [
        reshape(multiply(x, layer[name]), shape=(*lead, n, config.head_size))
        for name, n in zip("qkv", counts, strict=True)
    ]


def _project_all_heads(config: DecoderConfig, x: Tensor, layer: dict[str, Any], lead: tuple[int, int]) -> Tensor:
    """The heads of queries, keys and values side by side: [B, S, heads, head_size]."""
    count = config.heads + 2 * config.kv_heads
    return reshape(multiply(x, layer["qkv"]), shape=(*lead, count, config.head_size))


def _decodes_in_one_launch(config: DecoderConfig, layer: dict[str, Any], batch: Batch) -> bool:
    """Whether a step is a position of each request on a GPU, whose heads are rotated at most by halves."""
    plain = "qkv" in layer and "q_norm" not in layer and config.rotary in (None, "halves")
    return is_for_gpu() and batch.tokens.shape[1] == 1 and plain


def attend(
    config: DecoderConfig, x: Tensor, layer: dict[str, Any], pages: tuple[Any, Any], batch: Batch, angles: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of normalised rows x to the cache and themselves, and the pages with their keys and values."""
    if _decodes_in_one_launch(config, layer, batch):
        heads = _project_all_heads(config, x, layer, batch.tokens.shape)
        mixed, keys, values = decode_position(
            heads, angles, pages, batch.table, batch.past, batch.count, window=config.window
        )
        return multiply(reshape(mixed, shape=(x.shape[0], -1)), layer["output"]), keys, values
    q, k, v = project_heads(config, x, layer, batch.tokens.shape)
    if "q_norm" in layer:
        q, k = (nn.rms_norm(y, weight=cast(layer[f"{n}_norm"]["weight"], dtype=f32), eps=config.eps)
                for y, n in ((q, "q"), (k, "k")))  # fmt: skip
    if angles is not None:
        q, k = rotate(config, q, angles), rotate(config, k, angles)
    q, k, v = (cast(y, dtype=p.dtype) for y, p in zip((q, k, v), (pages[0], *pages), strict=True))
    keys, values = append_pages(*pages, k, v, batch.table, batch.past, batch.count)
    if batch.fresh:  # the keys are those of the step itself
        mixed = _attend_to_own(q, k, v, config.window)
    else:
        mixed = paged_attention(q, keys, values, batch.table, batch.past, batch.count, window=config.window)
    return multiply(reshape(mixed, shape=(x.shape[0], -1)), layer["output"]), keys, values


def _attend_to_own(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention of q [B, S, H, D] to k and v [B, S, G, D]: [B, S, H, D]."""
    q, k, v = (permute(x, axes=(0, 2, 1, 3)) for x in (q, k, v))
    mixed = scaled_dot_product_attention(q, k, v, causal=True, enable_gqa=True, window=window or None)
    return permute(mixed, axes=(0, 2, 1, 3))


def feed_forward(config: DecoderConfig, x: Tensor, layer: dict[str, Any]) -> Tensor:
    """The feed-forward network: SwiGLU (Shazeer 2020), or GELU between two products."""
    if config.feed_forward == "gelu":
        return multiply(nn.gelu(multiply(x, layer["up"]), approximate="tanh"), layer["down"])
    gate, up = _project_gate(config, x, layer)
    gate = cast(_round_as_weights(gate, layer), dtype=f32)
    return multiply(nn.silu(gate) * up, layer["down"])


def _project_gate(config: DecoderConfig, x: Tensor, layer: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The gate and what it gates. Of one matrix they are two products, so that the gate is computed in the second."""
    if "gate_up" not in layer:
        return multiply(x, layer["gate"]), multiply(x, layer["up"])
    part, hidden = layer["gate_up"], config.hidden
    if isinstance(part["weight"], QuantisedMatrix):
        both = multiply(x, part)
        return both[..., :hidden], both[..., hidden:]
    first, last = ({n: w[rows] for n, w in part.items()} for rows in (slice(hidden), slice(hidden, None)))
    return multiply(x, first), multiply(x, last)


def _round_as_weights(gate: Tensor, layer: dict[str, Any]) -> Tensor:
    """What is written between two products, rounded to the type of 16-bit weights."""
    weight = layer["gate_up" if "gate_up" in layer else "gate"]["weight"]
    narrow = not isinstance(weight, QuantisedMatrix) and weight.dtype.bits == 16
    return cast(gate, dtype=weight.dtype) if narrow else gate


def embed(weights: dict[str, Any], tokens: Tensor, places: Tensor) -> Tensor:
    """The embeddings of tokens, with those of their positions if the model learned them: f32."""
    table = weights["embedding"]
    x = take_rows(table, tokens) if isinstance(table, QuantisedMatrix) else cast(embedding(table, tokens), dtype=f32)
    if "positions" not in weights:
        return x
    table = weights["positions"]  # rows after a request's last token may lie past the context
    return x + cast(embedding(table, minimum(places, table.shape[0] - 1)), dtype=f32)


def run_layers(config: DecoderConfig, weights: Any, batch: Batch, cache: PagedCache) -> tuple[Tensor, PagedCache]:
    """The hidden state [B · S, width] after the last norm, and the cache with the keys and values of the tokens."""
    places = expand_dims(batch.past, 1) + iota(shape=(1, batch.tokens.shape[1]), dtype=int32)
    # Rows, so that a residual is added where a product is stored.
    x = reshape(embed(weights, batch.tokens, places), shape=(-1, config.width))
    angles = None if config.rotary is None else compute_angles(config, places)
    keys, values = [], []
    for layer, *pages in zip(weights["layers"], cache.keys, cache.values, strict=True):
        mixed, k, v = attend(config, normalise(config, x, layer["attention_norm"]), layer, tuple(pages), batch, angles)
        x = x + mixed
        x = x + feed_forward(config, normalise(config, x, layer["norm"]), layer)
        keys.append(k)
        values.append(v)
    return normalise(config, x, weights["norm"]), PagedCache(keys, values)


def compute_logits(weights: Any, x: Tensor) -> Tensor:
    """The logits of hidden states [..., width]: f32 [..., vocabulary]; a model without a head uses its embedding."""
    return multiply(x, {"weight": weights.get("head", weights["embedding"])})


def take_last(x: Tensor, count: Tensor) -> Tensor:
    """The last counted row of each request: x [B · S, width] to [B, width]."""
    batch = count.shape[0]
    length = x.shape[0] // batch
    if length == 1:
        return x
    last = iota(shape=(batch,), dtype=int32) * length + maximum(count - 1, 0)
    return gather(x, last, axis=0)
