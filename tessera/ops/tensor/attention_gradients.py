"""Gradients of attention as ops: the sums of each row's exponentials, and the gradients from them.

Reverse mode records them in the place of attention (tessera/transforms/autodiff/attention.py), so that a target may
compute the weights again instead of storing them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.types import DType, TensorType
from tessera.ir.rules import Op, batch, lower, op
from tessera.ir.tensor import Tensor, as_tensor, bind_op
from tessera.ops.tensor.attention import (
    exponentiate,
    hide_keys,
    multiply_groups,
    round_weights,
    scaled_dot_product_attention,
)
from tessera.ops.tensor.basic import check_operand_count
from tessera.ops.tensor.contractions import dot
from tessera.ops.tensor.elementwise import log2
from tessera.ops.tensor.reduce import sum
from tessera.ops.tensor.shape import reshape, squeeze, transpose

LOG2_E = math.log2(math.e)


def _infer_with_sums(q: TensorType, k: TensorType, v: TensorType, *mask, **attrs) -> tuple[TensorType, TensorType]:
    out = scaled_dot_product_attention.type_rule(q, k, v, *mask, **attrs, softcap=0.0, enable_gqa=True)
    return out.with_dtype(q.dtype), TensorType(out.shape[:-1], q.compute)


def _infer_gradients(
    q: TensorType, k: TensorType, v: TensorType, out: TensorType, sums: TensorType, g: TensorType, *mask, **attrs
) -> tuple[TensorType, ...]:
    _infer_with_sums(q, k, v, *mask, **attrs)  # which refuses what attention refuses
    return q, k, v


def _find_scores(q, k, mask, causal, scale, window):
    """The scores of queries and keys, minus infinity where a key is hidden."""
    k = np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3) if k.ndim > 2 else k
    s = np.matmul(q, np.swapaxes(k, -1, -2)) * q.dtype.type(scale)
    s = s if mask is None else s + mask
    distance = np.arange(q.shape[-2])[:, None] - np.arange(k.shape[-2])[None, :]
    seen = (distance >= 0 if causal else True) & (distance < window if window else True)
    return np.where(seen, s, -np.inf).astype(s.dtype)


def _coerce_with_mask(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `coerce_plain`; the last operand, the mask, may be missing."""
    given = [x for x in operands if x is not None]
    check_operand_count(op, given if len(given) == len(op.operands) else [*given, None])
    return bind_op(op, [as_tensor(x) for x in given], attrs)


@op(infer=_infer_with_sums, coerce=_coerce_with_mask)
def attention_with_sums(q, k, v, mask=None, *, causal: bool, scale: float, weights: DType, window: int):
    """`scaled_dot_product_attention` and, for each query, a number from which its weights follow.

    That is the logarithm to base 2 of the sum of the exponentials of its scores (0 without a key).
    """
    attrs = {"causal": causal, "scale": scale, "weights": weights, "window": window}
    s = _find_scores(q, k, mask, causal, scale, window)
    most = np.max(s, axis=-1, initial=-np.inf)
    most = np.where(most == -np.inf, s.dtype.type(0), most)
    total = np.sum(np.exp(s - most[..., None]), axis=-1)
    sums = np.where(total == 0, 0, most * LOG2_E + np.log2(np.where(total == 0, 1, total))).astype(s.dtype)
    return scaled_dot_product_attention.ref(q, k, v, mask, **attrs, softcap=0.0), sums


@op(infer=_infer_gradients, coerce=_coerce_with_mask)
def attention_gradients(q, k, v, out, sums, g, mask=None, *, causal: bool, scale: float, weights: DType, window: int):
    """The gradients of attention with regard to q, k and v, where that of its result is `g`.

    `out` and `sums` are the results of `attention_with_sums`, with the same mask. Weights, and the gradients of
    scores, are rounded to the type `weights` before they are multiplied.
    """
    s = _find_scores(q, k, mask, causal, scale, window)
    p = np.exp2(s * s.dtype.type(LOG2_E) - sums[..., None])
    rounded = lambda x: x.astype(weights.numpy).astype(x.dtype)  # noqa: E731
    group = q.shape[-3] // k.shape[-3] if k.ndim > 2 else 1
    keys, values = (np.repeat(x, group, axis=-3) if x.ndim > 2 else x for x in (k, v))
    ds = rounded(p * (np.matmul(g, np.swapaxes(values, -1, -2)) - np.sum(g * out, axis=-1, keepdims=True)))
    dk, dv = np.matmul(np.swapaxes(ds, -1, -2), q) * q.dtype.type(scale), np.matmul(np.swapaxes(rounded(p), -1, -2), g)
    if group > 1:
        dk, dv = (np.sum(x.reshape(*x.shape[:-3], -1, group, *x.shape[-2:]), axis=-3) for x in (dk, dv))
    return np.matmul(ds, keys) * q.dtype.type(scale), dk, dv


def _exponentiate(q, k, mask, causal, scale, window):
    """The exponentials of the scores, their sums, and what the scores are relative to."""
    s = multiply_groups(q, transpose(k)) * scale
    s = s if mask is None else s + mask
    return exponentiate(hide_keys(s, causal, window), mask is None and not window)


@lower(attention_with_sums)
def _(q, k, v, mask=None, *, causal, scale, weights, window):
    e, total, shift = _exponentiate(q, k, mask, causal, scale, window)
    return multiply_groups(round_weights(e, weights), v) / total, squeeze(shift * LOG2_E + log2(total), -1)


@lower(attention_gradients)
def _(q, k, v, out, sums, g, mask=None, *, causal, scale, weights, window):
    # As in the lowering of the other op, of which this one uses the values where both are expanded.
    e, total, _ = _exponentiate(q, k, mask, causal, scale, window)
    g = g / total
    change = e * (multiply_groups(g, transpose(v)) - sum(g * out, axis=-1, keepdims=True))
    change = round_weights(change, weights)
    dk = _multiply_turned(change, q, k) * scale
    return multiply_groups(change, k) * scale, dk, _multiply_turned(round_weights(e, weights), g, v)


def _multiply_turned(x: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """The transpose of x [..., H, S, T] times y [..., H, S, D], added up over the heads of each group of `like`."""
    if like.ndim > 2 and x.shape[-3] != like.shape[-3]:
        (*outer, heads, length, _), groups = x.shape, like.shape[-3]
        x, y = (reshape(t, shape=(*outer, groups, heads // groups * length, t.shape[-1])) for t in (x, y))
    return dot(transpose(x), y)


@batch(attention_with_sums, attention_gradients)
def _(lanes, **attrs):
    return bind_op(lanes.op, lanes.spread(), attrs)
