"""Attention layers: multi-head attention with PyTorch's weights, and attention with grouped queries."""

from __future__ import annotations

from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.types import f32
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn import initialisation as init
from tessera.nn.linear import Linear, check_count, check_features, linear
from tessera.nn.module import Module, Parameter
from tessera.nn.positions import RotaryEmbedding
from tessera.ops.api.creation import zeros
from tessera.ops.tensor.attention_calls import scaled_dot_product_attention
from tessera.ops.tensor.basic import broadcast_to, cast
from tessera.ops.tensor.elementwise import where
from tessera.ops.tensor.nn import dropout, softmax
from tessera.ops.tensor.reduce import mean
from tessera.ops.tensor.shape import concatenate, iota, permute, reshape


def check_heads(embed_dim: int, num_heads: int) -> int:
    """The features of a head.

    Raises:
        ArgumentError: the heads do not divide the features.
    """
    if check_count("embed_dim", embed_dim) % check_count("num_heads", num_heads):
        raise ArgumentError(
            f"{embed_dim} features cannot be divided among {num_heads} heads", location=user_location(),
            expected="embed_dim divisible by num_heads",
        )  # fmt: skip
    return embed_dim // num_heads


class MultiheadAttention(Module):
    """Multi-head attention with the weights and options of `torch.nn.MultiheadAttention`.

    Inputs are [S, N, E], or [N, S, E] with `batch_first`, or without N. The call gives the result; with
    `need_weights=True` also the weights [N, S, T], averaged over the heads unless `average_attn_weights=False`. In
    masks of bools true hides a key, as in PyTorch; masks of floats are added.

    >>> MultiheadAttention(8, 2)(zeros((3, 1, 8))).shape
    (3, 1, 8)

    Raises:
        ArgumentError: the heads do not divide the features.
        ShapeError: an input or a mask does not fit.
    """

    in_proj_weight: Any
    in_proj_bias: Any
    bias_k: Any
    bias_v: Any

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
        add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False,
        dtype: Any = f32,
    ) -> None:  # fmt: skip
        self.head_dim = check_heads(embed_dim, num_heads)
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.add_zero_attn, self.batch_first = add_zero_attn, batch_first
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.joined = self.kdim == self.vdim == embed_dim
        if self.joined:
            self.in_proj_weight = Parameter(init.xavier_uniform((3 * embed_dim, embed_dim), dtype=dtype))
        else:
            for name, size in (("q", embed_dim), ("k", self.kdim), ("v", self.vdim)):
                setattr(self, f"{name}_proj_weight", Parameter(init.xavier_uniform((embed_dim, size), dtype=dtype)))
        self.in_proj_bias = Parameter(zeros((3 * embed_dim,), dtype=dtype)) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias, dtype=dtype)
        if bias:
            self.out_proj.bias = zeros((embed_dim,), dtype=dtype)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, init.xavier_normal((1, 1, embed_dim), dtype=dtype) if add_bias_kv else None)

    def forward(
        self, query: Any, key: Any = None, value: Any = None, key_padding_mask: Any = None, need_weights: bool = False,
        attn_mask: Any = None, average_attn_weights: bool = True, is_causal: bool = False,
    ) -> Any:  # fmt: skip
        """Attention of queries to keys; without `key` they are the queries, without `value` the values are the keys."""
        query = as_tensor(query)
        key = query if key is None else as_tensor(key)
        value = key if value is None else as_tensor(value)
        single = query.ndim == 2
        q, k, v = (self._put_batch_first(x, n) for x, n in ((query, "query"), (key, "key"), (value, "value")))
        q, k, v = self._project(q, k, v)
        mask = self._make_mask(q, k, key_padding_mask, attn_mask, is_causal)
        if need_weights:
            out, weights = self._attend_with_weights(q, k, v, mask)
        else:
            out = scaled_dot_product_attention(q, k, v, mask, dropout=self.dropout, training=self.training)
        out = self.out_proj(reshape(permute(out, axes=(0, 2, 1, 3)), shape=(q.shape[0], q.shape[2], self.embed_dim)))
        out = out[0] if single else out if self.batch_first else permute(out, axes=(1, 0, 2))
        if not need_weights:
            return out
        weights = mean(weights, axis=1) if average_attn_weights else weights
        return out, weights[0] if single else weights

    def _put_batch_first(self, x: Tensor, name: str) -> Tensor:
        size = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}[name]
        if x.ndim not in (2, 3):
            order = "[N, S, E]" if self.batch_first else "[S, N, E]"
            raise ShapeError(
                f"the {name} has {x.ndim} axes", location=user_location(), expected=f"{order} or [S, E]",
                received=str(x.type),
            )  # fmt: skip
        check_features(x, size, f"the {name}")
        return x[None] if x.ndim == 2 else x if self.batch_first else permute(x, axes=(1, 0, 2))

    def _project(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as [N, heads, S, features]."""
        size = self.embed_dim
        if self.joined and q is k is v:
            joined = linear(q, self.in_proj_weight, self.in_proj_bias)
            parts = [joined[..., i * size : (i + 1) * size] for i in range(3)]
        else:
            weights = (
                [self.in_proj_weight[i * size : (i + 1) * size] for i in range(3)] if self.joined
                else [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
            )  # fmt: skip
            b = self.in_proj_bias
            biases = [None if b is None else b[i * size : (i + 1) * size] for i in range(3)]
            parts = [linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases, strict=True)]
        extra = [
            None if t is None else broadcast_to(t, shape=(q.shape[0], 1, size)) for t in (self.bias_k, self.bias_v)
        ]
        for i, row in enumerate(extra):
            parts[i + 1] = parts[i + 1] if row is None else concatenate([parts[i + 1], row], axis=1)
        if self.add_zero_attn:
            row = zeros((q.shape[0], 1, size), dtype=q.dtype)
            parts[1:] = [concatenate([x, row], axis=1) for x in parts[1:]]
        return tuple(self._split_heads(x) for x in parts)  # type: ignore[return-value]

    def _split_heads(self, x: Tensor) -> Tensor:
        return permute(reshape(x, shape=(x.shape[0], x.shape[1], self.num_heads, self.head_dim)), axes=(0, 2, 1, 3))

    def _make_mask(self, q: Tensor, k: Tensor, padding: Any, attn_mask: Any, causal: bool) -> Tensor | None:
        """All masks as one that is added, for all keys, those that this layer adds too."""
        queries, keys = q.shape[2], k.shape[2]
        own = keys - (self.bias_k is not None) - bool(self.add_zero_attn)
        found: Tensor | None = None
        masks = []
        if causal:
            hidden = iota(shape=(queries, own), axis=1) > iota(shape=(queries, own), axis=0)
            masks.append(hidden)
        if attn_mask is not None:
            mask = as_tensor(attn_mask)
            if mask.ndim == 3:
                mask = reshape(mask, shape=(-1, self.num_heads, *mask.shape[1:]))
            masks.append(mask)
        if padding is not None:
            mask = as_tensor(padding)
            mask = mask[None] if mask.ndim == 1 else mask
            masks.append(reshape(mask, shape=(mask.shape[0], 1, 1, mask.shape[1])))
        for mask in masks:
            if mask.shape[-1] != own or mask.shape[-2] not in (1, queries):
                raise ShapeError(
                    "a mask does not fit", location=user_location(), expected=f"[..., {queries}, {own}]",
                    received=str(mask.type),
                )  # fmt: skip
            added = mask if mask.dtype.is_float else where(mask, float("-inf"), zeros((), dtype=q.dtype))
            found = cast(added, dtype=q.dtype) if found is None else found + cast(added, dtype=q.dtype)
        if found is None or own == keys:
            return found
        row = zeros((*found.shape[:-1], keys - own), dtype=q.dtype)
        return concatenate([found, row], axis=-1)

    def _attend_with_weights(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = (q * self.head_dim**-0.5) @ permute(k, axes=(0, 1, 3, 2))
        weights = softmax(scores if mask is None else scores + mask, axis=-1)
        weights = dropout(weights, self.dropout, training=self.training)
        return weights @ v, weights

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.embed_dim}, {self.num_heads}"


class SelfAttention(MultiheadAttention):
    """Attention of a sequence [S, N, E] to itself.

    >>> SelfAttention(8, 2)(zeros((3, 1, 8))).shape
    (3, 1, 8)
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias)


class CrossAttention(MultiheadAttention):
    """Attention of queries [S, N, E] to a context [T, N, E].

    >>> CrossAttention(8, 2)(zeros((3, 1, 8)), zeros((5, 1, 8))).shape
    (3, 1, 8)
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias)


class GroupedQueryAttention(Module):
    """Attention of [N, S, E] to itself with fewer heads of keys and values than of queries (Ainslie et al. 2023).

    The weights are those of Llama: q_proj, k_proj, v_proj and o_proj. `rotary` turns queries and keys by their
    positions; `causal` hides later keys, `window` keys further back.

    >>> GroupedQueryAttention(8, 4, kv_heads=2)(zeros((1, 3, 8))).shape
    (1, 3, 8)

    Raises:
        ArgumentError: the heads do not divide each other or the features.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int | None = None, bias: bool = False, causal: bool = True,
        window: int | None = None, rotary: bool = True, rope_base: float = 10000.0, dropout: float = 0.0,
        dtype: Any = f32,
    ) -> None:  # fmt: skip
        self.head_dim = check_heads(embed_dim, num_heads)
        self.num_heads, self.kv_heads = num_heads, num_heads if kv_heads is None else check_count("kv_heads", kv_heads)
        if num_heads % self.kv_heads:
            raise ArgumentError(
                f"{num_heads} heads cannot share {kv_heads} heads of keys", location=user_location(),
                expected="num_heads divisible by kv_heads",
            )  # fmt: skip
        self.causal, self.window, self.dropout = causal, window, dropout
        narrow = self.kv_heads * self.head_dim
        self.q_proj = Linear(embed_dim, embed_dim, bias, dtype=dtype)
        self.k_proj = Linear(embed_dim, narrow, bias, dtype=dtype)
        self.v_proj = Linear(embed_dim, narrow, bias, dtype=dtype)
        self.o_proj = Linear(embed_dim, embed_dim, bias, dtype=dtype)
        self.rotary = RotaryEmbedding(self.head_dim, rope_base) if rotary else None

    def forward(self, x: Any, mask: Any = None, offset: Any = 0) -> Tensor:
        """The attended sequence; `offset` is the position of its first row."""
        x = as_tensor(x)
        if x.ndim != 3:
            raise ShapeError(
                "GroupedQueryAttention takes a batch of sequences", location=user_location(), expected="[N, S, E]",
                received=str(x.type),
            )  # fmt: skip
        heads = [(self.q_proj, self.num_heads), (self.k_proj, self.kv_heads), (self.v_proj, self.kv_heads)]
        q, k, v = (self._split(project(x), count) for project, count in heads)
        if self.rotary is not None:
            q, k = self.rotary(q, offset), self.rotary(k, offset)
        out = scaled_dot_product_attention(
            q, k, v, mask, causal=self.causal, window=self.window, dropout=self.dropout, training=self.training
        )
        return self.o_proj(reshape(permute(out, axes=(0, 2, 1, 3)), shape=x.shape))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return permute(reshape(x, shape=(x.shape[0], x.shape[1], heads, self.head_dim)), axes=(0, 2, 1, 3))
