"""Normalisation rows: layer, group, batch and root-mean-square norms, and distances, with derivatives (ATen)."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.shapes import broadcast
from tessera.core.types import uint8
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.matrices import matrix_transpose
from tessera.ops.tensor.metric_losses import pdist
from tessera.ops.tensor.shape import expand_dims, reshape
from tessera.torch.rows.reductions import norm_of
from tessera.torch.table import aten, narrow_to, wide, zeros


def _find_spread(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """x - mean, the mean, and the variance; the axes are kept."""
    count = float(math.prod(x.shape[a] for a in axes))
    mean = e.div(r.sum(x, axis=axes, keepdims=True), count)
    apart = x - mean
    return apart, mean, e.div(r.sum(apart * apart, axis=axes, keepdims=True), count)


def _standardise(x: Tensor, axes: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x - mean over the standard deviation, the mean, and one over the deviation; the axes are kept."""
    apart, mean, spread = _find_spread(x, axes)
    rest = e.rsqrt(spread + eps)
    return apart * rest, mean, rest


def _by_standardised(g: Tensor, y: Tensor, rest: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The derivative by x, from that by the standardised x."""
    count = float(math.prod(y.shape[a] for a in axes))
    mean = e.div(r.sum(g, axis=axes, keepdims=True), count)
    along = e.div(r.sum(g * y, axis=axes, keepdims=True), count)
    return (g - mean - y * along) * rest


@aten("native_layer_norm.default")
def _(x, normalized_shape, weight, bias, eps):
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    y, mean, rest = _standardise(wide(x), axes, eps)
    y = y if weight is None else y * wide(weight)
    y = y if bias is None else y + wide(bias)
    return narrow_to(y, x.dtype), mean, rest


@aten("layer_norm.default")
def _(x, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    y, _, _ = _standardise(wide(x), axes, eps)
    y = y if weight is None else y * wide(weight)
    return narrow_to(y if bias is None else y + wide(bias), x.dtype)


@aten("native_layer_norm_backward.default")
def _(g, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    outer = tuple(range(x.ndim - len(normalized_shape)))
    gw, rest = wide(g), wide(rstd)
    y = (wide(x) - wide(mean)) * rest
    by_y = gw if weight is None else gw * wide(weight)
    by_x = narrow_to(_by_standardised(by_y, y, rest, axes), x.dtype) if output_mask[0] else None
    by_weight = _sum_outer(gw * y, outer, weight) if output_mask[1] and weight is not None else None
    by_bias = _sum_outer(gw, outer, bias) if output_mask[2] and bias is not None else None
    return by_x, by_weight, by_bias


def _sum_outer(g: Tensor, axes: tuple[int, ...], like: Tensor) -> Tensor:
    return narrow_to(reshape(r.sum(g, axis=axes) if axes else g, shape=like.shape), like.dtype)


@aten("_fused_rms_norm.default")
def normalise_root_mean(x: Tensor, normalized_shape: Any, weight: Any, eps: float | None) -> tuple[Tensor, Tensor]:
    """x over its root mean square, and one over that."""
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    y, rest = _divide_by_root_mean(wide(x), axes, _default_eps(x, eps))
    y = y if weight is None else y * wide(weight)
    return narrow_to(y, x.dtype), rest


def _default_eps(x: Tensor, eps: float | None) -> float:
    """The difference of 1 and the next number of the type that ATen computes in."""
    return eps if eps is not None else 2.0**-52 if x.dtype.bits == 64 else 2.0**-23


def _divide_by_root_mean(x: Tensor, axes: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
    count = float(math.prod(x.shape[a] for a in axes))
    rest = e.rsqrt(e.div(r.sum(x * x, axis=axes, keepdims=True), count) + eps)
    return x * rest, rest


@aten("_fused_rms_norm_backward.default")
def _(g, x, normalized_shape, rstd, weight, output_mask):
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    outer = tuple(range(x.ndim - len(normalized_shape)))
    gw, rest = wide(g), wide(rstd)
    y = wide(x) * rest
    by_y = gw if weight is None else gw * wide(weight)
    count = float(math.prod(normalized_shape))
    by_x = (by_y - y * e.div(r.sum(by_y * y, axis=axes, keepdims=True), count)) * rest
    by_weight = _sum_outer(gw * y, outer, weight) if output_mask[1] and weight is not None else None
    return narrow_to(by_x, x.dtype) if output_mask[0] else None, by_weight


# Group norm: x [N, C, ...] in `group` groups of channels.


@aten("native_group_norm.default")
def _(x, weight, bias, n, c, hxw, group, eps):
    return normalise_groups(x, weight, bias, group, eps)


def normalise_groups(x: Tensor, weight: Any, bias: Any, group: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The result for groups of channels, and the mean and one over the deviation of each group."""
    n, c = x.shape[:2]
    hxw = math.prod(x.shape[2:])
    y, mean, rest = _standardise(reshape(wide(x), shape=(n, group, c // group * hxw)), (2,), eps)
    y = reshape(y, shape=(n, c, hxw))
    y = y if weight is None else y * expand_dims(wide(weight), 1)
    y = y if bias is None else y + expand_dims(wide(bias), 1)
    shaped = narrow_to(reshape(y, shape=x.shape), x.dtype)
    return shaped, reshape(mean, shape=(n, group)), reshape(rest, shape=(n, group))


@aten("native_group_norm_backward.default")
def _(g, x, mean, rstd, weight, n, c, hxw, group, output_mask):
    shape = (n, group, c // group, hxw)
    gw = reshape(wide(g), shape=shape)
    middle, rest = (reshape(wide(v), shape=(n, group, 1, 1)) for v in (mean, rstd))
    y = (reshape(wide(x), shape=shape) - middle) * rest
    scale = None if weight is None else reshape(wide(weight), shape=(group, c // group, 1))
    plain, along = (r.sum(v, axis=3, keepdims=True) for v in (gw, gw * y))  # of a channel: all results use them
    by_x = gw if scale is None else gw * scale
    means = (v if scale is None else v * scale for v in (plain, along))
    mean_by_y, mean_along = (e.div(r.sum(v, axis=2, keepdims=True), float(c // group * hxw)) for v in means)
    by_x = reshape((by_x - mean_by_y - y * mean_along) * rest, shape=x.shape)
    dtype = x.dtype if weight is None else weight.dtype
    by_weight, by_bias = (narrow_to(reshape(r.sum(v, axis=0), shape=(c,)), dtype) for v in (along, plain))
    found = (narrow_to(by_x, x.dtype), by_weight, by_bias)
    return tuple(v if wanted else None for v, wanted in zip(found, output_mask, strict=True))


# Batch norm: x [N, C, ...], each channel by itself.


def _per_channel(v: Tensor, x: Tensor) -> Tensor:
    return reshape(v, shape=(x.shape[1], *(1,) * (x.ndim - 2)))


def _batch_axes(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def normalise_batch(
    x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the mean and one over the deviation of each channel."""
    if training:
        return _normalise_training(x, weight, bias, eps)[:3]
    middle, rest = wide(mean), e.rsqrt(wide(var) + eps)
    y = (wide(x) - _per_channel(middle, x)) * _per_channel(rest, x)
    return _scale_channels(y, x, weight, bias), middle, rest


def _normalise_training(x: Tensor, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result by the batch's own statistics: with the mean, one over the deviation, and the variance."""
    apart, mean, spread = _find_spread(wide(x), _batch_axes(x))
    rest = e.rsqrt(spread + eps)
    held = (reshape(v, shape=(x.shape[1],)) for v in (mean, rest, spread))
    return _scale_channels(apart * rest, x, weight, bias), *held  # type: ignore[return-value]


def _scale_channels(y: Tensor, x: Tensor, weight: Any, bias: Any) -> Tensor:
    y = y if weight is None else y * _per_channel(wide(weight), x)
    y = y if bias is None else y + _per_channel(wide(bias), x)
    return narrow_to(y, x.dtype)


def _normalise_and_update(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The result in training, with the mean and one over the deviation; and the running mean and variance after it."""
    out, middle, rest, spread = _normalise_training(x, weight, bias, eps)
    return (out, middle, rest), _update(x, mean, var, middle, spread, momentum)


def _update(x: Tensor, mean: Tensor, var: Tensor, middle: Tensor, spread: Tensor, momentum: float) -> Any:
    """The running mean and variance after a batch; the new variance has the divisor n - 1."""
    count = x.size // x.shape[1]
    unbiased = spread * (count / max(count - 1, 1))
    return tuple(
        narrow_to(wide(old) * (1.0 - momentum) + new * momentum, old.dtype)
        for old, new in ((mean, middle), (var, unbiased))
    )


@aten("_native_batch_norm_legit_no_training.default")
def _(x, weight, bias, running_mean, running_var, momentum, eps):
    return normalise_batch(x, weight, bias, running_mean, running_var, False, eps)  # the statistics on a GPU alone


@aten("_native_batch_norm_legit.no_stats")
def _(x, weight, bias, training, momentum, eps):
    return normalise_batch(x, weight, bias, None, None, True, eps)


@aten("_native_batch_norm_legit.default", "native_batch_norm.default")
def _(x, weight, bias, running_mean, running_var, training, momentum, eps):
    return normalise_batch(x, weight, bias, running_mean, running_var, training, eps)


@aten("_native_batch_norm_legit_functional.default")
def _(x, weight, bias, running_mean, running_var, training, momentum, eps):
    if training:
        found, updated = _normalise_and_update(x, weight, bias, running_mean, running_var, momentum, eps)
        return *found, *updated
    found = normalise_batch(x, weight, bias, running_mean, running_var, False, eps)
    return *found, running_mean, running_var


@aten("_batch_norm_with_update_functional.default")
def _(x, weight, bias, running_mean, running_var, momentum, eps):
    found, updated = _normalise_and_update(x, weight, bias, running_mean, running_var, momentum, eps)
    return *found, zeros((0,), uint8), *updated


@aten("_batch_norm_no_update.default")
def _(x, weight, bias, running_mean, running_var, momentum, eps):
    found = normalise_batch(x, weight, bias, running_mean, running_var, False, eps)
    return *found, zeros((0,), uint8)


@aten("native_batch_norm_backward.default")
def _(g, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask):
    return _batch_gradients(g, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask)


@aten("batch_norm_backward.default")
def _(g, x, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask, reserve):
    return _batch_gradients(g, x, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask)


def _batch_gradients(
    g: Tensor, x: Tensor, weight: Any, running_mean: Any, running_var: Any, save_mean: Any, save_invstd: Any,
    train: bool, eps: float, output_mask: Any,
) -> Any:  # fmt: skip
    gw, axes = wide(g), _batch_axes(x)
    middle, rest = (wide(save_mean), wide(save_invstd)) if train else (wide(running_mean), None)
    rest = e.rsqrt(wide(running_var) + eps) if rest is None else rest
    y = (wide(x) - _per_channel(middle, x)) * _per_channel(rest, x)
    by_bias, by_weight = _sum_in_turn(gw, axes), _sum_in_turn(gw * y, axes)
    scale = rest if weight is None else rest * wide(weight)
    if train:
        count = float(math.prod(x.shape[a] for a in axes))
        gw = gw - _per_channel(by_bias / count, x) - y * _per_channel(by_weight / count, x)
    by_x = gw * _per_channel(scale, x)
    dtype = x.dtype if weight is None else weight.dtype
    found = (
        narrow_to(by_x, x.dtype),
        narrow_to(by_weight, dtype),
        narrow_to(by_bias, dtype),
    )
    return tuple(v if wanted else None for v, wanted in zip(found, output_mask, strict=True))


def _sum_in_turn(v: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The sum over the batch and the axes behind the channels: in two steps, which round less than one long sum."""
    return r.sum(v, axis=0) if len(axes) == 1 else r.sum(r.sum(v, axis=axes[1:]), axis=0)


# Distances.


MOST_DIRECT = 25  # rows of either operand whose distances ATen computes from differences, by default
BY_PRODUCT, DIRECT = 1, 2  # ATen's modes: "use_mm_for_euclid_dist" and "donot_use_mm_for_euclid_dist"


@aten("_cdist_forward.default")
def _(x, y, p, compute_mode):
    if not x.shape[-1]:
        return zeros((*broadcast(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-2]), x.dtype)
    many = x.shape[-2] > MOST_DIRECT or y.shape[-2] > MOST_DIRECT
    if p == 2 and (compute_mode == BY_PRODUCT or (compute_mode != DIRECT and many)):
        return measure_by_product(x, y)
    return narrow_to(norm_of(e.abs(expand_dims(wide(x), -2) - expand_dims(wide(y), -3)), p, -1, False), x.dtype)


@aten("_euclidean_dist.default")
def measure_by_product(x: Tensor, y: Tensor) -> Tensor:
    """The distances of rows by |x|² + |y|² - 2 x·y, as ATen computes many of them."""
    a, b = wide(x), wide(y)
    products = r.sum(a * a, axis=-1, keepdims=True) - 2.0 * matmul(a, matrix_transpose(b))
    squares = products + expand_dims(r.sum(b * b, axis=-1), -2)
    return narrow_to(e.sqrt(e.maximum(squares, 0.0)), x.dtype)


@aten("_pdist_forward.default")
def _(x, p=2.0):
    return pdist(x, p) if x.shape[0] > 1 else zeros((0,), x.dtype)


@aten("_weight_norm_interface_backward.default")
def _(grad_w, saved_v, saved_g, saved_norms, dim):
    """The derivatives of v · g / |v|, whose norms are over all axes but one."""
    kept, slope, v = dim % saved_v.ndim, wide(grad_w), wide(saved_v)
    axes = tuple(axis for axis in range(v.ndim) if axis != kept)
    norms = wide(saved_norms)
    along = r.sum(slope * v, axis=axes, keepdims=True) / norms
    by_v = (wide(saved_g) / norms) * (slope - v * (along / norms))
    return narrow_to(by_v, saved_v.dtype), narrow_to(along, saved_g.dtype)
