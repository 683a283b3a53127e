"""Neural network ops: activations, softmax, normalisation, attention, dropout and batch normalisation, with their
rules."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, user_location
from tessera.core.shapes import as_size, format_shape, normalize_axes, normalize_axis
from tessera.core.types import TensorType, f32
from tessera.ir.numerics.reference_kernels import compute_erf as erf_of
from tessera.ir.rules import batch, jvp, lower, op
from tessera.ir.tensor import Tensor, as_tensor, bind_op
from tessera.ops.tensor.basic import (
    parse_shape,
    round_once,
)
from tessera.ops.tensor.coercion import coerce_floating, coerce_pointwise, composite, unify_dtypes
from tessera.ops.tensor.elementwise import (
    abs,
    erf,
    exp,
    greater_equal,
    infer_numeric,
    log,
    maximum,
    minimum,
    rsqrt,
    tanh,
    where,
)
from tessera.ops.tensor.random import Generator, rand
from tessera.ops.tensor.reduce import count_elements, divide_by_count, max, mean, sum, var
from tessera.ops.tensor.scalar_functions import expm1, log1p, sigmoid
from tessera.ops.tensor.shape import reshape


@op(coerce=coerce_floating)
def softplus(x, *, beta: float = 1.0, threshold: float = math.inf):
    """log(1 + exp(beta · x)) / beta, without overflow; `x` where beta · x exceeds `threshold`.

    >>> import tessera as ts
    >>> ts.softplus([0.0, 50.0])
    Tensor([ 0.6931472, 50.       ], f32)
    """
    found = np.logaddexp(x * beta, x.dtype.type(0)) / beta
    return np.where(x * beta > threshold, x, found).astype(x.dtype)


@lower(softplus)
def _(x, *, beta, threshold):
    scaled = x if beta == 1.0 else x * beta
    found = maximum(scaled, 0.0) + log1p(exp(-abs(scaled)))
    found = found if beta == 1.0 else found / beta
    return found if threshold == math.inf else where(scaled > threshold, x, found)


@jvp(softplus)
@round_once
def _(out, primals, tangents, *, beta, threshold):
    slope = sigmoid(primals[0] * beta)
    return tangents[0] * (slope if threshold == math.inf else where(primals[0] * beta > threshold, 1.0, slope))


@op(coerce=coerce_floating)
def mish(x):
    """`x` times tanh(softplus(x)) (Misra 2019)."""
    return x * np.tanh(np.logaddexp(x, x.dtype.type(0)))


@lower(mish)
def _(x):
    return x * tanh(softplus(x))


@jvp(mish)
@round_once
def _(out, primals, tangents):
    (x,), (t,) = primals, tangents
    near = minimum(maximum(x, -MISH_LIMIT), MISH_LIMIT)  # twice its value does not overflow
    share = tanh(softplus(near))
    return t * (share + near * (1.0 - share * share) * sigmoid(near))


@op(coerce=coerce_floating)
def elu(x, *, alpha: float = 1.0):
    """`x` where it is positive, else alpha · (exp(x) - 1) (Clevert, Unterthiner and Hochreiter 2015)."""
    return np.where(x > 0, x, x.dtype.type(alpha) * np.expm1(np.where(x > 0, x.dtype.type(0), x)))


@lower(elu)
def _(x, *, alpha):
    return where(x > 0.0, x, alpha * expm1(minimum(x, 0.0)))


@jvp(elu)
@round_once
def _(out, primals, tangents, *, alpha):
    (x,), (t,) = primals, tangents
    return t * where(x > 0.0, 1.0, alpha * exp(where(x > 0.0, 0.0, x)))


@op(coerce=coerce_floating)
def leaky_relu(x, *, slope: float = 0.01):
    """`x` where it is positive, else slope · x."""
    return np.where(x > 0, x, x.dtype.type(slope) * x)


@lower(leaky_relu)
def _(x, *, slope):
    return where(x > 0.0, x, slope * x)


MISH_LIMIT = 800.0  # the derivative is 0 or 1 beyond it in every type
SQRT_HALF = math.sqrt(0.5)
GELU_SCALE = math.sqrt(2 / math.pi)
GELU_LIMIT = 40.0  # the derivative is 0 or 1 beyond it in every type
NORMAL_DENSITY = 1 / math.sqrt(2 * math.pi)  # the density of the normal distribution at 0


def _canonicalise_softmax_axis(x: TensorType, *, axis: int) -> dict[str, Any]:
    return {"axis": normalize_axis(axis, x.rank)}


@op(infer=infer_numeric, coerce=coerce_pointwise)
def relu(x):
    """`x` where it is positive, else 0."""
    return np.maximum(x, 0) + x.dtype.type(0)  # +0 for -0


@lower(relu)
def _(x):
    return maximum(x, 0)


@jvp(relu)
def _(out, primals, tangents):
    return where(out <= 0, 0.0, tangents[0])  # of the result, which later ops hold anyway


@op(coerce=coerce_floating)
def silu(x):
    """`x` times its sigmoid (swish)."""
    return x / (1 + np.exp(-x))


@lower(silu)
def _(x):
    return x / (1.0 + exp(-x))


@jvp(silu)
@round_once
def _(out, primals, tangents):
    (x,), (t,) = primals, tangents
    share = sigmoid(x)
    return t * (share * (1.0 + x * (1.0 - share)))


def _canonicalise_gelu(x: TensorType, *, approximate: str) -> dict[str, Any]:
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"unknown approximation {approximate!r}", expected='"none" or "tanh"')
    return {"approximate": approximate}


@op(coerce=coerce_floating, canonical=_canonicalise_gelu)
def gelu(x, *, approximate: str = "none"):
    """`x` times the normal distribution function at `x` (Hendrycks and Gimpel 2016); "tanh" approximates it."""
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(GELU_SCALE * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + erf_of(x * SQRT_HALF))


@lower(gelu)
def _(x, *, approximate):
    if approximate == "tanh":
        return 0.5 * x * (1.0 + tanh(GELU_SCALE * (x + 0.044715 * (x * x * x))))
    return 0.5 * x * (1.0 + erf(x * SQRT_HALF))


@jvp(gelu)
@round_once
def _(out, primals, tangents, *, approximate):
    (x,), (t,) = primals, tangents
    near = minimum(maximum(x, -GELU_LIMIT), GELU_LIMIT)  # its powers do not overflow
    square = near * near
    if approximate == "tanh":
        turned = tanh(GELU_SCALE * near * (1.0 + 0.044715 * square))
        slope = near * (1.0 - turned * turned) * (1.0 + 3 * 0.044715 * square)
        return t * (0.5 * (1.0 + turned + GELU_SCALE * slope))
    return t * (0.5 * (1.0 + erf(near * SQRT_HALF)) + near * (NORMAL_DENSITY * exp(-0.5 * square)))


@op(coerce=coerce_floating, canonical=_canonicalise_softmax_axis)
def softmax(x, *, axis: int = -1):
    """Softmax: exp(x) divided by its sum along `axis`, computed relative to the maximum; an empty axis stays empty."""
    if not x.shape[axis]:
        return x
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / np.sum(e, axis=axis, keepdims=True)


@lower(softmax)
def _(x, *, axis):
    if x.shape[axis] == 0:
        return x
    e = exp(x - max(x, axis=axis, keepdims=True))
    return e / sum(e, axis=axis, keepdims=True)


@op(coerce=coerce_floating, canonical=_canonicalise_softmax_axis)
def log_softmax(x, *, axis: int = -1):
    """The logarithm of softmax, computed without forming it."""
    if not x.shape[axis]:
        return x
    shifted = x - np.max(x, axis=axis, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))


@lower(log_softmax)
def _(x, *, axis):
    if x.shape[axis] == 0:
        return x
    shifted = x - max(x, axis=axis, keepdims=True)
    return shifted - log(sum(exp(shifted), axis=axis, keepdims=True))


def _canonicalise_normalize(x: TensorType, *, axis: Any, eps: float, center: bool) -> dict[str, Any]:
    return {"axis": normalize_axes(axis, x.rank), "eps": float(eps), "center": bool(center)}


@op(coerce=coerce_floating, canonical=_canonicalise_normalize)
def normalize(x, *, axis: Any = -1, eps: float = 1e-5, center: bool = True):
    """`x` scaled to unit mean square along `axis`, after subtraction of its mean if `center`."""
    d = x - np.mean(x, axis=axis, keepdims=True) if center else x
    return d / np.sqrt(np.mean(d * d, axis=axis, keepdims=True) + x.dtype.type(eps))


@lower(normalize)
def _(x, *, axis, eps, center):
    d = x - mean(x, axis=axis, keepdims=True) if center else x
    return d * rsqrt(mean(d * d, axis=axis, keepdims=True) + eps)


@composite
def layer_norm(x: Any, normalized_shape: Any = None, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """Layer normalisation over the last axes (Ba, Kiros and Hinton 2016), then `weight` and `bias`.

    `normalized_shape` names the trailing sizes; it may be left out where the last axis alone is meant.

    >>> layer_norm([[0.0, 2.0]], 2, eps=0.0)
    Tensor([[-1.,  1.]], f32)

    Raises:
        ShapeError: `x` does not end in `normalized_shape`.
    """
    return _apply_affine(normalize(x, axis=_find_trailing_axes(x, normalized_shape), eps=eps), weight, bias)


@composite
def rms_norm(x: Any, weight: Any = None, eps: float = 1e-5) -> Tensor:
    """Root mean square normalisation over the last axis (Zhang and Sennrich 2019), then `weight`."""
    return _apply_affine(normalize(x, axis=-1, eps=eps, center=False), weight, None)


def _find_trailing_axes(x: Any, normalized_shape: Any) -> tuple[int, ...]:
    if normalized_shape is None:
        return (-1,)
    if isinstance(normalized_shape, (Tensor, np.ndarray)) and as_tensor(normalized_shape).dtype.is_float:
        raise ArgumentError(
            "normalized_shape of layer_norm is a tensor", location=user_location(), expected="sizes, as in (2, 3)",
            received=str(as_tensor(normalized_shape).type), suggestion="write layer_norm(x, weight=...) for a weight",
        )  # fmt: skip
    wanted, shape = parse_shape(normalized_shape, as_size), as_tensor(x).shape
    last = shape[len(shape) - len(wanted) :]
    if len(wanted) > len(shape) or any(n != size for n, size in zip(wanted, last, strict=True)):
        raise ShapeError(
            "layer_norm over other sizes than the last ones", location=user_location(),
            expected=f"a shape that ends in {format_shape(wanted)}", received=format_shape(shape),
        )  # fmt: skip
    return tuple(range(-len(wanted), 0))


def _apply_affine(out: Tensor, weight: Any, bias: Any) -> Tensor:
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


# Derivatives and batching of the composites of neural networks.


@jvp(softmax)
@round_once
def _(out, primals, tangents, *, axis):
    # The maximum only keeps exp in range: it is constant for the derivative.
    moved = tangents[0] * out
    return moved - out * sum(moved, axis=axis, keepdims=True)


@jvp(log_softmax)
@round_once
def _(out, primals, tangents, *, axis):
    return tangents[0] - sum(exp(out) * tangents[0], axis=axis, keepdims=True)


@jvp(normalize)
@round_once
def _(out, primals, tangents, *, axis, eps, center):
    # The normalised elements add up to 0, so that the mean of the tangent does not change the mean of their products.
    (x,), (t,) = primals, tangents
    count = count_elements([x.shape[a] for a in axis])
    d = x - mean(x, axis=axis, keepdims=True) if center else x
    moved = t * rsqrt(mean(d * d, axis=axis, keepdims=True) + eps)
    along = divide_by_count(sum(out * moved, axis=axis, keepdims=True), count)
    rest = moved - divide_by_count(sum(moved, axis=axis, keepdims=True), count) if center else moved
    return rest - out * along


@batch(relu, sigmoid, silu, gelu, softmax, log_softmax, normalize)
def _(lanes, **attrs):
    # Axes count from the end, so that a leading one changes nothing.
    return bind_op(lanes.op, lanes.tensors, attrs)


# Ops that depend on `training`: dropout and batch normalisation.


@composite
def dropout(x: Any, p: float = 0.5, training: bool = True, generator: Generator | None = None) -> Tensor:
    """`x` with each element set to 0 with probability `p` and the others scaled by 1 / (1 - p).

    Without `training`, `x` is returned. The mask comes from `generator`, or the default one (see `Generator` on draws
    while tracing).

    >>> dropout([1.0, 2.0], training=False)
    Tensor([1., 2.], f32)

    Raises:
        ArgumentError: `p` is not in [0, 1].
    """
    x = as_tensor(x)
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout with probability {p}", location=user_location(), expected="0 to 1")
    if not x.dtype.is_float:
        raise DTypeError(
            "dropout needs floats", location=user_location(), received=str(x.type), suggestion="cast to ts.f32"
        )
    if not training or p == 0:
        return x
    kept = greater_equal(rand(x.shape, dtype=f32, generator=generator), p)
    return where(kept, x * (1.0 / (1.0 - p) if p < 1 else 1.0), 0.0)


@composite
def batch_norm(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    return_statistics: bool = False,
) -> Any:
    """Batch normalisation of `x` [B, C, ...] for each channel (Ioffe and Szegedy 2015), then `weight` and `bias` [C].

    With `training` it uses the mean and variance of the batch, else the running ones [C]. Tensors are immutable: with
    `return_statistics` the result is (y, running mean, running variance), where the running values are those after this
    batch (see `running_statistics`; without `training` they are as before).

    >>> batch_norm([[1.0], [3.0]], eps=0.0)
    Tensor([[-1.],
            [ 1.]], f32)
    >>> y, mean, var = batch_norm([[1.0], [3.0]], Tensor([0.0]), Tensor([1.0]), return_statistics=True)
    >>> mean, var
    (Tensor([0.2], f32), Tensor([1.1], f32))

    Raises:
        ShapeError: `x` has no axis of channels, or a statistic or weight is not [C].
        ArgumentError: the running statistics are needed, and missing.
    """
    y = _normalise_batch(x, running_mean, running_var, weight, bias, training, eps)
    if not return_statistics:
        return y
    known = _require_statistics(running_mean, running_var)
    return (y, *(running_statistics(x, *known, momentum) if training else known))


def _require_statistics(running_mean: Any, running_var: Any) -> tuple[Any, Any]:
    if running_mean is None or running_var is None:
        raise ArgumentError(
            "batch_norm needs running statistics", location=user_location(), expected="running_mean and running_var [C]"
        )
    return as_tensor(running_mean), as_tensor(running_var)


def _normalise_batch(
    x: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, training: bool, eps: float
) -> Tensor:
    x = as_tensor(x)
    check_channels("batch_norm", x, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    axes = (0, *range(2, x.ndim))
    shape = (x.shape[1], *(1 for _ in axes[1:]))
    if training:
        middle, spread = mean(x, axis=axes, keepdims=True), var(x, axis=axes, keepdims=True)
    else:
        known = unify_dtypes(_require_statistics(running_mean, running_var))
        middle, spread = (reshape(t, shape=shape) for t in known)
    out = (x - middle) * rsqrt(spread + eps)
    out = out if weight is None else out * reshape(weight, shape=shape)
    return out if bias is None else out + reshape(bias, shape=shape)


def check_channels(by: str, x: Tensor, **each: Any) -> None:
    """Refuse an `x` that is not [B, C, ...], and statistics and weights that are not [C].

    Raises:
        ShapeError: one of them.
    """
    if x.ndim < 2:
        raise ShapeError(f"{by} takes [B, C, ...]", location=user_location(), received=str(x.type))
    for name, value in each.items():
        if value is not None and as_tensor(value).shape != (x.shape[1],):
            raise ShapeError(
                f"{name} of {by} is not one number for each channel", location=user_location(),
                expected=f"shape ({x.shape[1]},), for {x.type}", received=str(as_tensor(value).type),
            )  # fmt: skip


@composite
def running_statistics(x: Any, running_mean: Any, running_var: Any, momentum: float = 0.1) -> tuple[Tensor, Tensor]:
    """The running mean and variance of `batch_norm` after this batch: old · (1 - momentum) + new · momentum.

    The new variance is the sample variance (divisor n - 1).
    """
    x = as_tensor(x)
    check_channels("batch_norm", x, running_mean=running_mean, running_var=running_var)
    axes = (0, *range(2, x.ndim))
    new = mean(x, axis=axes), var(x, axis=axes, correction=1.0)
    old = as_tensor(running_mean), as_tensor(running_var)
    return tuple(o * (1.0 - momentum) + n * momentum for o, n in zip(old, new, strict=True))  # type: ignore[return-value]
