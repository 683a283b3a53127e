"""Activation rows: activations and their derivatives, dropout and losses (ATen's `nn` ops)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tessera.core.types import bool_, f32
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import nn
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor import scalar_functions as s
from tessera.ops.tensor.basic import cast, splat
from tessera.ops.tensor.random import rand
from tessera.ops.tensor.shape import concatenate, reshape
from tessera.torch.rows.shapes import slice_axis
from tessera.torch.table import aten, floating, narrow_to, promote, wide


def _in_wide(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A row that computes 16-bit floats in f32 and rounds once; its result has the type of the first operand."""

    def row(x: Tensor, *args: Any, **named: Any) -> Tensor:
        found = function(wide(x), *(wide(a) if isinstance(a, Tensor) else a for a in args), **named)
        return narrow_to(found, x.dtype)

    return row


@aten("relu.default")
def _(x):
    return e.maximum(x, 0) if not x.dtype.is_float else e.where(e.less_equal(x, 0.0), 0.0, x)


aten("gelu.default")(lambda x, approximate="none": nn.gelu(x, approximate=approximate))
aten("silu.default")(lambda x: nn.silu(floating(x)))
aten("mish.default")(lambda x: nn.mish(x))


@aten("leaky_relu.default")
@_in_wide
def _(x, negative_slope=0.01):
    return e.where(e.greater(x, 0.0), x, x * float(negative_slope))


@aten("elu.default")
@_in_wide
def _(x, alpha=1, scale=1, input_scale=1):
    below = s.expm1(e.minimum(x, 0.0) * float(input_scale)) * (float(alpha) * float(scale))
    return e.where(e.greater(x, 0.0), x * float(scale), below)


@aten("hardtanh.default")
def _(x, min_val=-1, max_val=1):
    low, high = (float(v) if x.dtype.is_float else int(v) for v in (min_val, max_val))
    return e.minimum(e.maximum(x, low), high)


@aten("relu6.default")
def _(x):
    return e.minimum(e.maximum(x, 0), 6)


@aten("hardswish.default")
@_in_wide
def _(x):
    return x * e.minimum(e.maximum(x + 3.0, 0.0), 6.0) / 6.0


@aten("hardsigmoid.default")
@_in_wide
def _(x):
    return e.minimum(e.maximum(x + 3.0, 0.0), 6.0) / 6.0


@aten("softplus.default")
@_in_wide
def _(x, beta=1, threshold=20):
    scaled = x * float(beta)
    return e.where(
        e.greater(scaled, float(threshold)), x, s.log1p(e.exp(e.minimum(scaled, float(threshold)))) / float(beta)
    )


@aten("threshold.default")
def _(x, threshold, value):
    low, new = (float(v) if x.dtype.is_float else int(v) for v in (threshold, value))
    return e.where(e.less_equal(x, low), new, x)


@aten("hardshrink.default")
def _(x, lambd=0.5):
    inside = e.bitwise_and(e.greater_equal(x, -float(lambd)), e.less_equal(x, float(lambd)))
    return e.where(inside, 0.0, x)


@aten("softshrink.default")
@_in_wide
def _(x, lambd=0.5):
    near = e.where(e.less(x, -float(lambd)), x + float(lambd), x * 0.0)
    return e.where(e.greater(x, float(lambd)), x - float(lambd), near)


@aten("_prelu_kernel.default")
def _(x, weight):
    return e.where(e.greater(x, 0.0), x, weight * x)


@aten("prelu.default")
def _(x, weight):
    shape = (weight.size, *(1 for _ in range(x.ndim - 2))) if weight.size > 1 else (1,) * x.ndim
    return e.where(e.greater(x, 0.0), x, reshape(weight, shape=shape) * x)


@aten("glu.default")
def _(x, dim=-1):
    axis = dim % x.ndim
    half = x.shape[axis] // 2
    first, second = (wide(slice_axis(x, axis, i, i + half)) for i in (0, half))
    return narrow_to(first * s.sigmoid(second), x.dtype)


# Derivatives of activations.


@aten("sigmoid_backward.default")
@_in_wide
def _(g, out):
    return g * (1.0 - out) * out


@aten("tanh_backward.default")
@_in_wide
def _(g, out):
    return g * (1.0 - out * out)


@aten("threshold_backward.default")
def _(g, x, threshold):
    low = float(threshold) if x.dtype.is_float else int(threshold)
    return e.where(e.less_equal(x, low), 0.0 if g.dtype.is_float else 0, g)


@aten("leaky_relu_backward.default")
@_in_wide
def _(g, x, negative_slope, self_is_result=False):
    return e.where(e.greater(x, 0.0), g, g * float(negative_slope))


@aten("elu_backward.default")
@_in_wide
def _(g, alpha, scale, input_scale, is_result, x):
    slope = float(input_scale) * float(scale)
    if is_result:
        below = g * float(input_scale) * (x + float(alpha) * float(scale))
    else:
        below = g * (slope * float(alpha)) * e.exp(e.minimum(x, 0.0) * float(input_scale))
    return e.where(e.less_equal(x, 0.0), below, g * float(scale))


@aten("gelu_backward.default")
@_in_wide
def _(g, x, approximate="none"):
    if approximate == "none":
        inner = 0.5 * (1.0 + e.erf(x * (1 / math.sqrt(2))))
        return g * (inner + x * e.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi)))
    root = math.sqrt(2 / math.pi)
    t = e.tanh((x + x * x * x * 0.044715) * root)
    slope = (1.0 - t * t) * (root * (1.0 + x * x * (3 * 0.044715)))
    return g * (0.5 * (1.0 + t) + 0.5 * x * slope)


@aten("silu_backward.default")
@_in_wide
def _(g, x):
    y = s.sigmoid(x)
    return g * y * (1.0 + x * (1.0 - y))


@aten("mish_backward.default")
@_in_wide
def _(g, x):
    t, y = e.tanh(nn.softplus(x)), s.sigmoid(x)
    return g * (t + x * y * (1.0 - t * t))


@aten("hardswish_backward.default")
@_in_wide
def _(g, x):
    inside = g * (x / 3.0 + 0.5)
    return e.where(e.less_equal(x, -3.0), 0.0, e.where(e.less(x, 3.0), inside, g))


@aten("hardsigmoid_backward.default")
@_in_wide
def _(g, x):
    inside = e.bitwise_and(e.greater(x, -3.0), e.less(x, 3.0))
    return e.where(inside, g / 6.0, 0.0)


@aten("hardtanh_backward.default")
def _(g, x, min_val, max_val):
    outside = e.bitwise_or(e.less_equal(x, float(min_val)), e.greater_equal(x, float(max_val)))
    return e.where(outside, 0.0, g)


@aten("softplus_backward.default")
@_in_wide
def _(g, x, beta, threshold):
    scaled = x * float(beta)
    z = e.exp(e.minimum(scaled, float(threshold)))
    return e.where(e.greater(scaled, float(threshold)), g, g * z / (z + 1.0))


@aten("hardshrink_backward.default", "softshrink_backward.default")
def _(g, x, lambd):
    inside = e.bitwise_and(e.greater_equal(x, -float(lambd)), e.less_equal(x, float(lambd)))
    return e.where(inside, 0.0, g)


@aten("_prelu_kernel_backward.default")
def _(g, x, weight):
    positive = e.greater(x, 0.0)
    return e.where(positive, g, weight * g), e.where(positive, 0.0, x * g)


@aten("glu_backward.default")
def _(g, x, dim):
    axis = dim % x.ndim
    half = x.shape[axis] // 2
    first, second = (wide(slice_axis(x, axis, i, i + half)) for i in (0, half))
    gate, gw = s.sigmoid(second), wide(g)
    return narrow_to(concatenate([gw * gate, gw * first * gate * (1.0 - gate)], axis=axis), x.dtype)


@aten("logit_backward.default")
@_in_wide
def _(g, x, eps=None):
    low = -1.0 if eps is None else float(eps)
    slope = g / (x * (1.0 - x))
    outside = e.bitwise_or(e.less(x, 0.0 if eps is None else low), e.greater(x, 1.0 if eps is None else 1.0 - low))
    return e.where(outside, math.nan if eps is None else 0.0, slope)


# Dropout: the elements that it keeps are drawn by Tessera's counter-based generator, not as PyTorch draws them.


@aten("native_dropout.default")
def _(x, p, train):
    if train is False or p == 0:
        return x, splat(True, x.type.with_dtype(bool_))
    kept = e.greater_equal(rand(x.shape, dtype=f32), float(p))
    scaled = wide(x) * (1.0 / (1.0 - p) if p < 1 else 0.0)
    return narrow_to(e.where(kept, scaled, 0.0), x.dtype), kept


@aten("native_dropout_backward.default")
def _(g, mask, scale):
    gw = wide(floating(g))
    return narrow_to(gw * cast(mask, dtype=gw.dtype) * float(scale), floating(g).dtype)


@aten("dropout.default")
def _(x, p, train):
    return nn.dropout(x, p, train)


@aten("bernoulli.default")
def _(x):
    return cast(e.less(rand(x.shape, dtype=f32), cast(x, dtype=f32)), dtype=x.dtype)


@aten("bernoulli.p")
def _(x, p=0.5):
    return cast(e.less(rand(x.shape, dtype=f32), float(p)), dtype=x.dtype)


# Losses.


def _reduce(loss: Tensor, reduction: int) -> Tensor:
    return loss if reduction == 0 else r.sum(loss) if reduction == 2 else e.div(r.sum(loss), float(loss.size))


@aten("mse_loss.default")
def _(x, y, reduction=1):
    d = wide(x) - wide(y)
    return narrow_to(_reduce(d * d, reduction), promote(x, y))


@aten("smooth_l1_loss.default")
def _(x, y, reduction=1, beta=1.0):
    d = e.abs(wide(x) - wide(y))
    loss = d if beta == 0 else e.where(e.less(d, float(beta)), d * d * (0.5 / beta), d - 0.5 * beta)
    return narrow_to(_reduce(loss, reduction), promote(x, y))


@aten("huber_loss.default")
def _(x, y, reduction=1, delta=1.0):
    d = e.abs(wide(x) - wide(y))
    loss = e.where(e.less_equal(d, float(delta)), d * d * 0.5, (d - 0.5 * delta) * float(delta))
    return narrow_to(_reduce(loss, reduction), promote(x, y))


@aten("binary_cross_entropy.default")
def _(x, y, weight=None, reduction=1):
    p, t = wide(x), wide(y)
    loss = (t - 1.0) * e.maximum(s.log1p(-p), -100.0) - t * e.maximum(e.log(p), -100.0)
    return narrow_to(_reduce(loss if weight is None else loss * wide(weight), reduction), x.dtype)


def _spread(g: Tensor, x: Tensor, reduction: int) -> Tensor:
    return wide(g) if reduction != 1 else wide(g) / float(max(x.size, 1))


@aten("mse_loss_backward.default")
def _(g, x, y, reduction):
    return narrow_to(_spread(g, x, reduction) * (wide(x) - wide(y)) * 2.0, x.dtype)


@aten("smooth_l1_loss_backward.default")
def _(g, x, y, reduction, beta):
    d = wide(x) - wide(y)
    sign = cast(e.greater(d, 0.0), dtype=d.dtype) - cast(e.less(d, 0.0), dtype=d.dtype)
    slope = sign if beta == 0 else e.where(e.greater_equal(e.abs(d), float(beta)), sign, d / float(beta))  # or NaN
    return narrow_to(_spread(g, x, reduction) * slope, x.dtype)


@aten("huber_loss_backward.default")
def _(g, x, y, reduction, delta):
    d = wide(x) - wide(y)
    return narrow_to(_spread(g, x, reduction) * e.minimum(e.maximum(d, -float(delta)), float(delta)), x.dtype)


@aten("binary_cross_entropy_backward.default")
def _(g, x, y, weight=None, reduction=1):
    p = wide(x)
    slope = _spread(g, x, reduction) * (p - wide(y)) / e.maximum((1.0 - p) * p, 1e-12)
    return narrow_to(slope if weight is None else slope * wide(weight), x.dtype)
