"""Product rows: matrix products and attention, with their derivatives (ATen's linear algebra)."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.types import f32, int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor.attention import scaled_dot_product_attention
from tessera.ops.tensor.attention_gradients import attention_gradients, attention_with_sums
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.matrices import matrix_transpose
from tessera.ops.tensor.rearrange import pad
from tessera.ops.tensor.shape import expand_dims, iota, reshape, squeeze
from tessera.torch.table import aten, convert, narrow_to, promote, wide, zeros


@aten("mm.default", "bmm.default", "matmul.default", "mv.default", "dot.default")
def _(x, y):
    return multiply(x, y)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """The matrix product in the operands' type."""
    return matmul(x, y, dtype=x.dtype)


@aten("linear.default")
def _(x, weight, bias=None):
    out = matmul(wide(x), matrix_transpose(wide(weight)))
    return narrow_to(out if bias is None else out + wide(bias), x.dtype)


@aten("addmm.default", "baddbmm.default", "addmv.default")
def _(x, first, second, beta=1, alpha=1):
    return _add_product(x, _wide_product(first, second), beta, alpha)


@aten("addbmm.default")
def _(x, first, second, beta=1, alpha=1):
    return _add_product(x, r.sum(_wide_product(first, second), axis=0), beta, alpha)


def _wide_product(first: Tensor, second: Tensor) -> Tensor:
    return matmul(first, second, dtype=first.type.compute) if first.dtype.is_float else multiply(first, second)


def _add_product(x: Tensor, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    scaled = product if alpha == 1 else product * convert(alpha, product.dtype)
    if beta == 0:
        return narrow_to(scaled, x.dtype)
    added = wide(x) if beta == 1 else wide(x) * convert(beta, product.dtype)
    return narrow_to(added + scaled, x.dtype)


@aten("outer.default", "ger.default")
def _(x, y):
    dtype = promote(x, y)
    return expand_dims(convert(x, dtype), 1) * expand_dims(convert(y, dtype), 0)


# Attention. Each device has a name of its own for it; all compute the same.


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The result, and the logarithm of each query's sum of weights, in f32."""
    if k.shape[-2] == 0:
        out = scaled_dot_product_attention(q, k, v, bias, causal=causal, scale=scale)
        return out, r.logsumexp(_scores(q, k, bias, causal, scale), axis=-1)
    out, sums = attention_with_sums(q, k, v, *_list_masks(q, bias), **_name_constants(q, causal, scale))
    return out, sums * math.log(2)


def _list_masks(q: Tensor, bias: Tensor | None) -> list[Tensor]:
    """A bias as the mask operand of attention, if there is one."""
    if bias is not None and bias.dtype.kind == "bool":
        bias = convert(e.where(bias, 0.0, -math.inf), q.dtype)
    return [] if bias is None else [bias]


def _name_constants(q: Tensor, causal: bool, scale: float | None) -> dict[str, Any]:
    """The attributes of attention that is recorded for its gradients."""
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    weights = q.dtype if q.dtype.bits == 16 else q.type.compute
    return {"causal": causal, "scale": factor, "weights": weights, "window": 0}


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    k = _repeat_heads(k, q)
    s = matmul(wide(q), matrix_transpose(wide(k))) * factor
    if bias is not None:
        s = e.where(bias, s, -math.inf) if bias.dtype.kind == "bool" else s + wide(bias)
    if causal:
        rows, columns = (iota(shape=s.shape[-2:], axis=a) for a in (0, 1))
        s = e.where(e.less(rows, columns), -math.inf, s)
    return s


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    if x.shape[-3] == q.shape[-3]:
        return x
    many = q.shape[-3] // x.shape[-3]
    return reshape(
        e.add(expand_dims(x, -3), zeros((*x.shape[:-2], many, *x.shape[-2:]), x.dtype)),
        shape=(*x.shape[:-3], q.shape[-3], *x.shape[-2:]),
    )


@aten("scaled_dot_product_attention.default")
def _(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    return scaled_dot_product_attention(q, k, v, attn_mask, causal=is_causal, scale=scale)


@aten("_scaled_dot_product_flash_attention_for_cpu.default")
def _(q, k, v, dropout_p=0.0, is_causal=False, attn_mask=None, scale=None):
    return _attend(q, k, v, attn_mask, is_causal, scale)


@aten("_scaled_dot_product_flash_attention.default")
def _(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None):
    out, log_sum = _attend(q, k, v, None, is_causal, scale)
    return (out, log_sum, None, None, q.shape[-2], k.shape[-2], *_no_draws(), zeros((0,), q.dtype))


def _no_draws() -> tuple[Tensor, Tensor]:
    return zeros((), int64), zeros((), int64)


@aten("_scaled_dot_product_efficient_attention.default")
def _(q, k, v, attn_bias=None, compute_log_sumexp=False, dropout_p=0.0, is_causal=False, scale=None):
    out, log_sum = _attend(q, k, v, attn_bias, is_causal, scale)
    rows = log_sum.shape[-1]
    if compute_log_sumexp:  # in memory of whole blocks of 32 rows
        log_sum = pad(log_sum, ((0, 0), (0, 0), (0, -rows % 32)))
    else:
        log_sum = zeros((*log_sum.shape[:2], 0), f32)
    return (out, log_sum, *_no_draws())


@aten("_scaled_dot_product_cudnn_attention.default")
def _(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None):
    out, log_sum = _attend(q, k, v, attn_bias, is_causal, scale)
    return (out, expand_dims(log_sum, -1), None, None, q.shape[-2], k.shape[-2], *_no_draws(), zeros((0,), q.dtype))


@aten("_scaled_dot_product_attention_math.default")
def _(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, dropout_mask=None, scale=None, enable_gqa=False):
    s = _scores(q, k, attn_mask, is_causal, scale)
    most = r.max(s, axis=-1, keepdims=True)
    weights = e.exp(s - e.where(e.equal(most, -math.inf), 0.0, most))
    total = r.sum(weights, axis=-1, keepdims=True)
    weights = weights / e.where(e.equal(total, 0.0), 1.0, total)
    return narrow_to(matmul(weights, wide(_repeat_heads(v, q))), q.dtype), narrow_to(weights, q.dtype)


def _attention_gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, bias: Tensor | None, causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The derivatives by q, k and v, whose weights are computed again (Dao 2023)."""
    if k.shape[-2] == 0:
        return _attention_gradients_by_scores(g, q, k, v, out, log_sum, bias, causal, scale)[:3]
    sums = e.where(e.equal(log_sum, -math.inf), 0.0, log_sum * math.log2(math.e))
    constants = _name_constants(q, causal, scale)
    return attention_gradients(q, k, v, out, sums, g, *_list_masks(q, bias), **constants)  # type: ignore[no-any-return]


def _attention_gradients_by_scores(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, bias: Tensor | None, causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The derivatives by q, k, v and the scores (Dao et al. 2022, algorithm 4)."""
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    gw, ow, vw = wide(g), wide(out), wide(_repeat_heads(v, q))
    rest = expand_dims(log_sum, -1)
    weights = e.exp(_scores(q, k, bias, causal, scale) - e.where(e.equal(rest, -math.inf), 0.0, rest))
    by_weights = matmul(gw, matrix_transpose(vw))
    by_scores = weights * (by_weights - r.sum(gw * ow, axis=-1, keepdims=True))
    by_q = matmul(by_scores, wide(_repeat_heads(k, q))) * factor
    by_k = _join_heads(matmul(matrix_transpose(by_scores), wide(q)) * factor, k)
    by_v = _join_heads(matmul(matrix_transpose(weights), gw), v)
    return narrow_to(by_q, q.dtype), narrow_to(by_k, k.dtype), narrow_to(by_v, v.dtype), by_scores


def _join_heads(g: Tensor, x: Tensor) -> Tensor:
    if g.shape[-3] == x.shape[-3]:
        return g
    groups = x.shape[-3]
    return r.sum(reshape(g, shape=(*g.shape[:-3], groups, g.shape[-3] // groups, *g.shape[-2:])), axis=-3)


@aten("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def _(g, q, k, v, out, logsumexp, dropout_p, is_causal, attn_mask=None, scale=None):
    return _attention_gradients(g, q, k, v, out, logsumexp, attn_mask, is_causal, scale)


@aten("_scaled_dot_product_flash_attention_backward.default")
def _(
    g, q, k, v, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset,
    scale=None,
):  # fmt: skip
    return _attention_gradients(g, q, k, v, out, logsumexp, None, is_causal, scale)


@aten("_scaled_dot_product_efficient_attention_backward.default")
def _(
    g, q, k, v, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask, is_causal=False,
    scale=None,
):  # fmt: skip
    given = (g, q, k, v, out, logsumexp[:, :, : q.shape[-2]], attn_bias, is_causal, scale)
    if attn_bias is None or not grad_input_mask[3]:
        return (*_attention_gradients(*given), None)
    *found, by_scores = _attention_gradients_by_scores(*given)
    return (*found, _unbroadcast(by_scores, attn_bias))


def _unbroadcast(g: Tensor, x: Tensor) -> Tensor:
    axes = tuple(i for i, (n, m) in enumerate(zip(g.shape, x.shape, strict=True)) if n != m)
    return narrow_to(r.sum(g, axis=axes, keepdims=True) if axes else g, x.dtype)


@aten("_scaled_dot_product_cudnn_attention_backward.default")
def _(
    g, q, k, v, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, scale=None,
):  # fmt: skip
    return _attention_gradients(g, q, k, v, out, squeeze(logsumexp, axis=-1), attn_bias, is_causal, scale)
