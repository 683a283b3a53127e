"""Composite rows: ops that PyTorch composes of others, which stay whole here (ATen's CompositeImplicitAutograd ops)."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.types import TensorType
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor.basic import broadcast_to, splat
from tessera.ops.tensor.contractions import einsum
from tessera.ops.tensor.matrices import moveaxis
from tessera.ops.tensor.scalar_functions import log1p
from tessera.ops.tensor.shape import expand_dims, reshape
from tessera.torch.rows.elementwise import convert_element_type
from tessera.torch.rows.normalisation import normalise_batch, normalise_groups, normalise_root_mean
from tessera.torch.rows.reductions import norm_of, variance
from tessera.torch.rows.shapes import slice_axis
from tessera.torch.rows.windows import ADAPTIVE_AVERAGES, CONVOLUTIONS, TRANSPOSED, per_axis, with_batch
from tessera.torch.table import ATEN, aten, narrow_to, wide

# Conversion and views.

aten("contiguous.default")(lambda x: x)
aten("type_as.default", "to.other")(lambda x, other, copy=False: convert_element_type(x, other.dtype))
aten("expand_as.default")(lambda x, other: broadcast_to(x, shape=other.shape))
aten("broadcast_to.default")(lambda x, size: ATEN["aten.expand.default"](x, size))
aten("view_as.default", "reshape_as.default")(lambda x, other: reshape(x, shape=other.shape))
aten("swapaxes.default", "swapdims.default")(lambda x, a, b: ATEN["aten.transpose.int"](x, a, b))
aten("mT.default")(lambda x: ATEN["aten.transpose.int"](x, -2, -1))
aten("movedim.intlist", "movedim.int", "moveaxis.int", "moveaxis.intlist")(
    lambda x, source, destination: moveaxis(x, source, destination) if x.ndim else x
)
aten("min.other")(lambda x, y: ATEN["aten.minimum.default"](x, y))
aten("max.other")(lambda x, y: ATEN["aten.maximum.default"](x, y))


@aten("to.dtype", "to.device", "to.dtype_layout")
def _(x, dtype=None, copy=False):
    return x if dtype is None else convert_element_type(x, dtype)


@aten("chunk.default")
def _(x, chunks, dim=0):
    axis = dim % x.ndim
    size = x.shape[axis]
    step = -(-size // chunks)
    if not step:
        return [x] * chunks
    return [slice_axis(x, axis, i, min(i + step, size)) for i in range(0, size, step)]


@aten("tensor_split.sections")
def _(x, sections, dim=0):
    axis = dim % x.ndim
    step, more = divmod(x.shape[axis], sections)
    ends = [step * (i + 1) + min(i + 1, more) for i in range(sections)]
    return [slice_axis(x, axis, a, b) for a, b in zip([0, *ends], ends, strict=False)]


@aten("unflatten.int")
def _(x, dim, sizes):
    axis = dim % x.ndim
    known = math.prod(n for n in sizes if n != -1)
    inner = tuple(x.shape[axis] // known if n == -1 else n for n in sizes)
    return reshape(x, shape=(*x.shape[:axis], *inner, *x.shape[axis + 1 :]))


@aten("tile.default")
def _(x, dims):
    return ATEN["aten.repeat.default"](x, [*(1,) * (x.ndim - len(dims)), *dims])


@aten("repeat_interleave.self_int")
def _(x, repeats, dim=None, output_size=None):
    x, axis = (reshape(x, shape=(-1,)), 0) if dim is None or not x.ndim else (x, dim % x.ndim)
    shape = (*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :])
    spread = broadcast_to(expand_dims(x, axis + 1), shape=shape)
    return reshape(spread, shape=(*x.shape[:axis], x.shape[axis] * repeats, *x.shape[axis + 1 :]))


@aten("hstack.default")
def _(tensors):
    rows = [t if t.ndim else reshape(t, shape=(1,)) for t in tensors]
    return ATEN["aten.cat.default"](rows, 0 if rows[0].ndim == 1 else 1)


@aten("vstack.default")
def _(tensors):
    return ATEN["aten.cat.default"]([t if t.ndim > 1 else reshape(t, shape=(1, -1)) for t in tensors], 0)


@aten("pad.default")
def _(x, pad, mode="constant", value=None):
    if mode == "constant":
        return ATEN["aten.constant_pad_nd.default"](x, pad, value or 0)
    kind = {"reflect": "reflection", "replicate": "replication"}[mode]
    return ATEN[f"aten.{kind}_pad{len(pad) // 2}d.default"](x, pad)


# Products and convolutions.


@aten("einsum.default")
def _(equation, tensors, path=None):
    return einsum(equation, *tensors)


def _convolve(rank: int) -> Any:
    def row(
        x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:  # fmt: skip
        around = padding if isinstance(padding, str) else per_axis(padding, rank)
        settings = (per_axis(stride, rank), around, per_axis(dilation, rank), groups)
        return with_batch(lambda v: CONVOLUTIONS[rank](v, weight, bias, *settings), x, rank)

    return row


def _convolve_transposed(rank: int) -> Any:
    def row(
        x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
        groups: int = 1, dilation: Any = 1,
    ) -> Tensor:  # fmt: skip
        steps, around, more = (per_axis(v, rank) for v in (stride, padding, output_padding))
        settings = (steps, around, more, groups, per_axis(dilation, rank))
        return with_batch(lambda v: TRANSPOSED[rank](v, weight, bias, *settings), x, rank)

    return row


for _rank in (1, 2, 3):
    aten(f"conv{_rank}d.default", f"conv{_rank}d.padding")(_convolve(_rank))
    aten(f"conv_transpose{_rank}d.{'default' if _rank == 1 else 'input'}")(_convolve_transposed(_rank))
for _rank in (2, 3):
    aten(f"adaptive_avg_pool{_rank}d.default")(
        lambda x, size, rank=_rank: with_batch(lambda v: ADAPTIVE_AVERAGES[rank](v, tuple(size)), x, rank)
    )


# Norms.


@aten("batch_norm.default")
def _(x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True):
    return normalise_batch(x, weight, bias, running_mean, running_var, training or running_mean is None, eps)[0]


@aten("group_norm.default")
def _(x, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    return normalise_groups(x, weight, bias, num_groups, eps)[0]


@aten("instance_norm.default")
def _(x, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled=True):
    return normalise_groups(x, weight, bias, x.shape[1], eps)[0]


@aten("rms_norm.default")
def _(x, normalized_shape, weight=None, eps=None):
    return normalise_root_mean(x, normalized_shape, weight, eps)[0]


@aten("std.default")
def _(x, unbiased=True):
    return _deviation(x, None, unbiased, False)


@aten("std.dim")
def _(x, dim=None, unbiased=True, keepdim=False):
    return _deviation(x, dim, unbiased, keepdim)


def _deviation(x: Tensor, dim: Any, unbiased: bool, keepdim: bool) -> Tensor:
    return narrow_to(e.sqrt(variance(wide(x), dim, int(unbiased), keepdim)), x.dtype)


@aten("norm.Scalar")
def _(x, p=2):
    return narrow_to(norm_of(e.abs(wide(x)), p, None, False), x.dtype)


@aten("norm.ScalarOpt_dim")
def _(x, p, dim, keepdim=False):
    return narrow_to(norm_of(e.abs(wide(x)), 2 if p is None else p, dim, keepdim), x.dtype)


# Activations and losses.

aten("selu.default")(lambda x: ATEN["aten.elu.default"](x, 1.6732632423543772, 1.0507009873554805, 1))
aten("celu.default")(lambda x, alpha=1.0: ATEN["aten.elu.default"](x, alpha, 1, 1.0 / alpha))


@aten("log_sigmoid.default")
def _(x):
    y = wide(x)
    return narrow_to(e.minimum(y, 0.0) - log1p(e.exp(-e.abs(y))), x.dtype)


def _reduce(loss: Tensor, reduction: int) -> Tensor:
    return loss if reduction == 0 else r.sum(loss) if reduction == 2 else e.div(r.sum(loss), float(loss.size))


@aten("l1_loss.default")
def _(x, y, reduction=1):
    return narrow_to(_reduce(e.abs(wide(x) - wide(y)), reduction), x.dtype)


@aten("kl_div.default")
def _(x, target, reduction=1, log_target=False):
    a, t = wide(x), wide(target)
    if log_target:
        return narrow_to(_reduce(e.exp(t) * (t - a), reduction), x.dtype)
    term = e.where(e.equal(t, 0.0), 0.0, t * e.log(e.where(e.equal(t, 0.0), 1.0, t))) - t * a
    return narrow_to(_reduce(term, reduction), x.dtype)


@aten("cross_entropy_loss.default")
def _(x, target, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0):
    scores = ATEN["aten._log_softmax.default"](wide(x), 1 if x.ndim > 1 else 0, False)
    loss = ATEN["aten.nll_loss_forward.default"](scores, target, weight, reduction, ignore_index)[0]
    return narrow_to(loss, x.dtype)


# Simulated quantisation: values rounded to multiples of a scale within bounds, and where they are within.


def _simulate_quantisation(x: Tensor, scale: Tensor, zero_point: Any, low: int, high: int) -> tuple[Tensor, Tensor]:
    places = e.round(wide(x) * (1.0 / scale)) + zero_point
    held = e.minimum(e.maximum(places, low), high)
    return narrow_to((held - zero_point) * scale, x.dtype), e.equal(held, places)


@aten("fake_quantize_per_tensor_affine_cachemask.default")
def _(x, scale, zero_point, quant_min, quant_max):
    return _simulate_quantisation(x, splat(scale, TensorType((), wide(x).dtype)), zero_point, quant_min, quant_max)


@aten("fake_quantize_per_channel_affine_cachemask.default")
def _(x, scale, zero_point, axis, quant_min, quant_max):
    shape = tuple(n if i == axis % x.ndim else 1 for i, n in enumerate(x.shape))
    scale, zero_point = (reshape(convert_element_type(t, wide(x).dtype), shape=shape) for t in (scale, zero_point))
    return _simulate_quantisation(x, scale, zero_point, quant_min, quant_max)
