"""Scaled dot-product attention as users call it: the attention op with lengths of caches and dropout of weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, user_location
from tessera.core.types import f32, int64
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor import attention
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import cast, stop_gradient
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.elementwise import bitwise_and, equal, exp, greater_equal, less, tanh, where
from tessera.ops.tensor.random import Generator, rand
from tessera.ops.tensor.reduce import max, sum
from tessera.ops.tensor.shape import iota, reshape, transpose


@check_arguments
def scaled_dot_product_attention(
    q: Any, k: Any, v: Any, mask: Any = None, *, causal: bool = False, scale: Any = None, weights: Any = None,
    window: Any = None, softcap: Any = None, enable_gqa: bool = True, lengths: Any = None, dropout: float = 0.0,
    training: bool = True, generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q kᵀ · scale + mask) v, for q [..., H, S, D], k and v [..., G, T, D]; other leading axes broadcast.

    G divides H: each head of keys and values is shared by H / G adjacent heads of queries (grouped queries, Ainslie et
    al. 2023). `enable_gqa=False` requires equal heads, or one that broadcasts. Without heads, q is [S, D].

    The mask [..., S, T] is added; a mask of bools is true where a query sees a key. A query that sees no key gives 0,
    as PyTorch's function does. `causal` hides key j from query i where j > i, and `window` where j <= i - window (a
    sliding window; None or 0: no window). `softcap` replaces scores, before the mask, by softcap · tanh(scores /
    softcap) (None or 0: not). `scale` is 1/sqrt(D) unless given. The unnormalised weights exp(score - maximum) are
    rounded to the type `weights` by `rough_cast` before the product with v. The default is the type of v if that has
    16 bits, as tensor cores need it; `weights=ts.f32` does not round. The divisor is the sum of the weights before
    rounding.

    With integers `lengths` of the shape of the axes before the heads, k and v are caches: only the first lengths[b]
    keys exist, whatever lies after them, and the queries are the last S positions before that end. So `causal` hides
    key j from query i where j > lengths[b] - S + i, and `window` counts from there too.

    `dropout` sets weights to 0 with this probability and scales the others by 1 / (1 - dropout), unless `training` is
    false. Weight [..., h, i, j] is dropped where `ts.rand` of that shape from `generator` (or the default one) is below
    `dropout`. The scores are then stored, and weights are not rounded.

    PyTorch's names `attn_mask`, `is_causal` and `dropout_p` are `mask`, `causal` and `dropout`.

    >>> import tessera as ts
    >>> q, k = ts.zeros((4, 1, 8)), ts.zeros((2, 1, 8))
    >>> ts.scaled_dot_product_attention(q, k, ts.Tensor([[[1.0]], [[2.0]]])).reshape(4)
    Tensor([1., 1., 2., 2.], f32)
    >>> q, k, v = ts.zeros((1, 1, 1, 8)), ts.zeros((1, 1, 3, 8)), ts.Tensor([[[[1.0], [3.0], [9.0]]]])
    >>> ts.scaled_dot_product_attention(q, k, v, lengths=[2]).reshape(1)
    Tensor([2.], f32)

    Raises:
        ArgumentError: `window` is negative, `softcap` is negative or not finite, `dropout` is not in [0, 1), or a
            length is not in 0 to T.
        DTypeError: `weights` is not a float type, or lengths are not integers.
        ShapeError: G does not divide H, D is 0, lengths have another shape, or other axes do not fit.
    """
    if not 0 <= dropout < 1:
        raise ArgumentError(f"attention with dropout {dropout}", expected="a probability from 0 to before 1")
    known: dict[str, Any] = {"scale": scale, "weights": weights, "softcap": softcap, "enable_gqa": enable_gqa}
    if lengths is not None:
        window = attention.check_window(window, softcap)
        q, k, v, mask = _mask_lengths(as_tensor(q), as_tensor(k), as_tensor(v), mask, lengths, causal, window)
        causal, window = False, None
    if dropout == 0 or not training:
        return attention.scaled_dot_product_attention(q, k, v, mask, causal=causal, window=window, **known)
    tensors = attention.broadcast_operands([x for x in (q, k, v, mask) if x is not None], enable_gqa)
    named = attention.complete_attributes(*(t.type for t in tensors), causal=causal, window=window, **known)
    named = {name: named[name] for name in ("causal", "scale", "window", "softcap")}
    return _attend_with_dropout(*tensors, **named, dropout=dropout, generator=generator)


@composite
def _attend_with_dropout(
    q: Any, k: Any, v: Any, mask: Any = None, *, causal: bool, scale: float, window: int, softcap: float,
    dropout: float, generator: Generator | None,
) -> Tensor:  # fmt: skip
    """Attention by its definition, with weights dropped before the product."""
    s = attention.multiply_groups(q, transpose(k)) * scale
    s = tanh(s * (1.0 / softcap)) * softcap if softcap else s
    s = attention.hide_keys(s if mask is None else s + mask, causal, window)
    if s.shape[-1] == 0:
        return attention.multiply_groups(s, v)
    most = stop_gradient(max(s, axis=-1, keepdims=True))
    e = exp(s - where(equal(most, -math.inf), 0.0, most))
    total = sum(e, axis=-1, keepdims=True)
    kept = where(greater_equal(rand(s.shape, dtype=f32, generator=generator), dropout), e * (1 / (1 - dropout)), 0.0)
    return attention.multiply_groups(kept, v) / where(equal(total, 0.0), 1.0, total)


def _mask_lengths(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, lengths: Any, causal: bool, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operands in which the keys from each length on are 0, and a mask that hides them, later keys and earlier ones."""
    held = _check_lengths(q, k, lengths)
    end = reshape(held, shape=(*held.shape, *(1,) * (2 if q.ndim < 3 else 3)))
    size, keys = (q.shape[-2], k.shape[-2]), iota(shape=(1, k.shape[-2]), axis=-1, dtype=int64)
    seen = less(keys, end)
    rows = reshape(seen, shape=(*seen.shape[:-2], k.shape[-2], 1))  # 0 · NaN after a cache's end is NaN
    k, v = where(rows, k, 0.0), where(rows, v, 0.0)
    place = iota(shape=(size[0], 1), axis=-2, dtype=int64) + (end - size[0])
    seen = bitwise_and(seen, less(keys, place + 1)) if causal else seen
    seen = bitwise_and(seen, less(place - window, keys)) if window else seen
    if mask is None:
        return q, k, v, seen
    mask = as_tensor(mask)
    if mask.dtype.kind == "bool":
        return q, k, v, bitwise_and(mask, seen)
    return q, k, v, where(seen, mask, -math.inf)


def _check_lengths(q: Tensor, k: Tensor, lengths: Any) -> Tensor:
    held = as_tensor(lengths)
    if not held.dtype.is_integer:
        raise DTypeError("lengths of keys are no integers", location=user_location(), received=str(held.type))
    if held.shape != q.shape[:-3]:
        raise ShapeError(
            "the lengths of keys do not fit", location=user_location(),
            expected=f"the axes before the heads, {q.shape[:-3]}", received=str(held.type),
        )  # fmt: skip
    values = None if held.is_traced else np.asarray(held.data)
    if values is not None and values.size and not 0 <= values.min() <= values.max() <= k.shape[-2]:
        raise ArgumentError(
            "a length does not fit the keys", location=user_location(), expected=f"0 to {k.shape[-2]}",
            received=str(values.tolist()),
        )  # fmt: skip
    return cast(held, dtype=int64)
