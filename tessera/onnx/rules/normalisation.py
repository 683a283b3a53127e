"""Normalisation: batch, instance, group, layer and RMS normalisation, LRN, p-norms, and dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.core.types import DType
from tessera.ir.tensor import Tensor
from tessera.onnx.element_types import find_element
from tessera.onnx.node_rules import NodeCall, rule
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor.basic import broadcast_to, cast
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.rearrange import pad
from tessera.ops.tensor.shape import reshape


def _per_channel(vector: Tensor, rank: int) -> Tensor:
    return reshape(vector, shape=(1, -1, *(1,) * (rank - 2)))


@rule("BatchNormalization")
def _(call: NodeCall, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Any:
    if not call.attr("training_mode", 0):
        if call.since < 7 and not call.attr("is_test", 0):
            raise call.refuse("training in opset below 7")
        return _normalise_batch(x, scale, bias, mean, variance, call.attr("epsilon"))
    axes = (0, *range(2, x.ndim))
    now, spread = r.mean(x, axis=axes), r.var(x, axis=axes)
    keep = call.attr("momentum")
    out = _normalise_batch(x, scale, bias, now, spread, call.attr("epsilon"))
    means, spreads = (cast(t, dtype=mean.dtype) for t in (now, spread))
    return out, mean * keep + means * (1 - keep), variance * keep + spreads * (1 - keep)


def _normalise_batch(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, epsilon: float) -> Tensor:
    wide = x.type.compute
    rows = (_per_channel(cast(t, dtype=wide), x.ndim) for t in (scale, bias, mean, variance))
    s, b, m, v = rows
    return cast((cast(x, dtype=wide) - m) * (s / e.sqrt(v + epsilon)) + b, dtype=x.dtype)


@composite
def _standardise(x: Tensor, axes: tuple[int, ...], epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """`x` normalised over axes, with the mean and one over the standard deviation."""
    mean = r.mean(x, axis=axes, keepdims=True)
    moved = x - mean
    scale = 1.0 / e.sqrt(r.mean(moved * moved, axis=axes, keepdims=True) + epsilon)
    return moved * scale, mean, scale


@rule("InstanceNormalization")
def _(call: NodeCall, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    epsilon = call.attr("epsilon")

    @composite
    def normalise(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        out = _standardise(x, tuple(range(2, x.ndim)), epsilon)[0]
        return out * _per_channel(scale, x.ndim) + _per_channel(bias, x.ndim)

    return normalise(x, scale, bias)


@rule("GroupNormalization")
def _(call: NodeCall, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups, epsilon = call.attr("num_groups"), call.attr("epsilon")
    dtype = _stash_type(call, x)
    wide = reshape(cast(x, dtype=dtype), shape=(x.shape[0], groups, -1))
    out = cast(_standardise(wide, (-1,), epsilon)[0], dtype=x.dtype)
    if call.since < 21:  # one scale for each group
        out = out * reshape(scale, shape=(1, groups, 1)) + reshape(bias, shape=(1, groups, 1))
        return reshape(out, shape=x.shape)
    return reshape(out, shape=x.shape) * _per_channel(scale, x.ndim) + _per_channel(bias, x.ndim)


def _stash_type(call: NodeCall, x: Tensor) -> DType:
    """The type in which statistics are computed."""
    wanted = call.attr("stash_type", None)
    return x.dtype if wanted is None else find_element(wanted, "stash_type")


@rule("LayerNormalization")
def _(call: NodeCall, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = call.attr("axis")
    axes = tuple(range(axis if axis < 0 else axis - x.ndim, 0))
    wide = cast(x, dtype=_stash_type(call, x))
    out, mean, inverse = _standardise(wide, axes, call.attr("epsilon"))
    out = cast(out, dtype=x.dtype) * scale
    return out if bias is None else out + bias, mean, inverse


@rule("RMSNormalization")
def _(call: NodeCall, x: Tensor, scale: Tensor) -> Tensor:
    axis = call.attr("axis")
    axes = tuple(range(axis if axis < 0 else axis - x.ndim, 0))
    wide = cast(x, dtype=_stash_type(call, x))
    out = wide / e.sqrt(r.mean(wide * wide, axis=axes, keepdims=True) + call.attr("epsilon"))
    return cast(out, dtype=scale.dtype) * scale


@rule("LpNormalization")
def _(call: NodeCall, x: Tensor) -> Tensor:
    axis, p = call.attr("axis"), call.attr("p")

    @composite
    def normalise(x: Tensor) -> Tensor:
        size = r.sum(e.abs(x) if p == 1 else x * x, axis=axis, keepdims=True)
        size = size if p == 1 else e.sqrt(size)
        none = e.equal(size, 0)
        return e.where(none, 0.0, x / e.where(none, 1.0, size))

    return normalise(x)


@rule("MeanVarianceNormalization")
def _(call: NodeCall, x: Tensor) -> Tensor:
    axes = tuple(call.attr("axes", (0, 2, 3)))

    @composite
    def normalise(x: Tensor) -> Tensor:
        moved = x - r.mean(x, axis=axes, keepdims=True)
        return moved / (e.sqrt(r.mean(moved * moved, axis=axes, keepdims=True)) + 1e-9)

    return normalise(x)


@rule("LRN")
def _(call: NodeCall, x: Tensor) -> Tensor:
    size, alpha, beta, bias = (call.attr(n) for n in ("size", "alpha", "beta", "bias"))

    @composite
    def normalise(x: Tensor) -> Tensor:
        channels = x.shape[1]
        around = ((0, 0), ((size - 1) // 2, size // 2), *((0, 0) for _ in x.shape[2:]))
        squares = pad(x * x, around)
        total = squares[:, :channels]
        for i in range(1, size):
            total = total + squares[:, i : i + channels]
        return x / (total * (alpha / size) + bias) ** beta

    return normalise(x)


@rule("Dropout", static=(1, 2))
def _(call: NodeCall, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None) -> Any:
    share = 0.5 if ratio is None else float(call.array(ratio, "the ratio").reshape(()))
    on = training is not None and bool(call.array(training, "training_mode").reshape(()))
    if call.since < 7:
        on = not call.attr("is_test", 0)
    if on and share > 0:
        raise call.refuse("random zeros in training mode: no two systems draw the same ones")
    if not call.wants(1):
        return x
    return x, broadcast_to(Tensor(np.asarray(True)), shape=x.shape)
