"""Neural network ops: activations, softmax, normalisation, attention, dropout and batch normalisation, with their
rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, TesseraError, user_location
from tessera.core.shapes import Size, as_size, broadcast, format_shape, normalize_axes, normalize_axis
from tessera.core.types import DType, TensorType, as_dtype, f32
from tessera.ir.numerics.error_rules import bound_rough_cast
from tessera.ir.numerics.reference_kernels import compute_erf as erf_of
from tessera.ir.rules import STORAGE, batch, error, jvp, lower, op
from tessera.ir.tensor import Tensor, as_tensor, bind_op
from tessera.ops.tensor.basic import (
    broadcast_to,
    cast,
    check_operand_count,
    coerce_plain,
    parse_shape,
    round_once,
    stop_gradient,
)
from tessera.ops.tensor.coercion import coerce_floating, coerce_pointwise, composite, promote_types, unify_dtypes
from tessera.ops.tensor.contractions import dot
from tessera.ops.tensor.elementwise import (
    abs,
    equal,
    erf,
    exp,
    greater_equal,
    infer_numeric,
    less,
    log,
    maximum,
    minimum,
    rsqrt,
    tanh,
    where,
)
from tessera.ops.tensor.random import Generator, rand
from tessera.ops.tensor.reduce import max, mean, sum, var
from tessera.ops.tensor.scalar_functions import expm1, log1p, sigmoid
from tessera.ops.tensor.shape import iota, permute, reshape, transpose


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


def _attention_coerce(op, operands, attrs):
    given = [x for x in operands if x is not None]
    check_operand_count(op, [*given, *[None] * (len(op.operands) - len(given))] if len(given) >= 3 else given)
    try:
        grouped = attrs["enable_gqa"] if op is scaled_dot_product_attention else None
        return bind_op(op, broadcast_operands(given, grouped), attrs)
    except TesseraError as error:
        raise error.at(user_location()) from None


def broadcast_operands(given: Sequence[Any], grouped: bool | None) -> list[Tensor]:
    """Queries, keys, values and mask as tensors: a mask of bools is added, and leading axes are broadcast.

    `grouped`: heads of keys may be fewer than those of queries; None: the operands have their axes already.
    """
    tensors = [as_tensor(x) for x in given]
    if len(tensors) > 3 and tensors[3].dtype.kind == "bool":
        tensors[3] = cast(where(tensors[3], 0.0, -math.inf), dtype=tensors[0].dtype)
    promote_types([t.type for t in tensors])
    if len(tensors) > 3:
        _check_mask(tensors[0], tensors[1], tensors[3], heads_second=grouped is not None)
    return tensors if grouped is None else broadcast_leading_axes(tensors, grouped)


def _check_mask(q: Tensor, k: Tensor, mask: Tensor, heads_second: bool) -> None:
    """Check that the mask broadcasts with the scores, and does not add queries or keys; heads are axis -3 or -2.

    Raises:
        ShapeError: it does not.
    """
    if min(q.ndim, k.ndim) < (2 if heads_second else 4):
        return  # refused as such
    at = -2 if heads_second else -3
    ends = (q.shape[at], k.shape[at])
    scores = (*(q.shape[:-2] if heads_second else (q.shape[0], q.shape[2])), *ends)
    try:
        fits = broadcast(mask.shape, scores)[-2:] == ends
    except ShapeError:
        fits = False
    if not fits:
        raise ShapeError(
            "the mask of attention does not fit the scores of queries and keys",
            expected=f"a shape that broadcasts to {format_shape(scores)}, or to more leading axes: the last two are "
            f"{ends[0]} queries and {ends[1]} keys, or 1",
            received=f"a mask of shape {format_shape(mask.shape)}",
        )  # fmt: skip


def broadcast_leading_axes(tensors: list[Tensor], grouped: bool) -> list[Tensor]:
    """Queries, keys and values with the leading axes to which theirs and those of the mask broadcast.

    Keys and values of fewer heads than the queries keep them: each head is shared by a group of heads of queries.
    """
    if any(t.ndim < 2 for t in tensors[:3]):
        return tensors
    heads = _find_head_counts(tensors) if grouped else None
    if heads is None:
        lead = broadcast(*(t.shape[:-2] for t in tensors))
        wanted = [lead] * 3
    else:
        outer = broadcast(*(t.shape[:-3] for t in tensors))
        wanted = [(*outer, heads[0]), (*outer, heads[1]), (*outer, heads[1])]
    operands = [
        t if t.shape[:-2] == lead else broadcast_to(t, shape=(*lead, *t.shape[-2:]))
        for t, lead in zip(tensors[:3], wanted, strict=True)
    ]
    return [*operands, *tensors[3:]]


def _find_head_counts(tensors: list[Tensor]) -> tuple[int, int] | None:
    """The heads of queries and of keys where they differ and the first is more than one; else None."""
    if any(t.ndim < 3 for t in tensors[:3]):
        return None
    heads = broadcast(*(t.shape[-3:-2] for t in (tensors[0], *tensors[3:])))[0]
    groups = broadcast(*(t.shape[-3:-2] for t in tensors[1:3]))[0]
    if not (isinstance(heads, int) and isinstance(groups, int)) or heads in (1, groups):
        return None
    _check_groups(heads, groups)
    return heads, groups


def _check_groups(heads: Size, groups: Size) -> None:
    if groups == 0 or heads % groups:
        raise ShapeError(
            "the heads of keys and values do not divide those of queries",
            expected="q [..., H, S, D] with k and v [..., G, T, D], where G divides H",
            received=f"H = {heads}, G = {groups}", suggestion="give keys and values H heads, or a divisor of H",
        )  # fmt: skip


@op(infer=lambda x, *, dtype: x.with_dtype(dtype), coerce=coerce_plain, numerics=STORAGE)
def rough_cast(x, *, dtype: DType):
    """`x` in a narrower float type, to nearest even; values below the smallest normal f32 may become 0."""
    return x.astype(dtype.numpy)


error(rough_cast)(bound_rough_cast)


@lower(rough_cast)
def _(x, *, dtype):
    return cast(x, dtype=dtype)


def complete_attributes(
    q: TensorType, k: TensorType, v: TensorType, *mask: TensorType, causal, scale, weights, window, softcap, enable_gqa
) -> dict[str, Any]:
    for each in (q, k, v):
        if not each.dtype.is_float:
            raise DTypeError("attention takes floats", expected="[..., S, D] of floats", received=str(each))
        if each.rank < 2:
            raise ShapeError("attention takes [..., S, D] of floats", received=str(each))
    if q.shape[-1] == 0:
        raise ShapeError("attention needs at least one feature", received=str(q))
    scale = float(scale) if scale is not None else 1 / math.sqrt(int(q.shape[-1]))
    window, softcap = check_window(window, softcap), 0.0 if softcap is None else float(softcap)
    more = {"window": window, "softcap": softcap, "enable_gqa": bool(enable_gqa)}
    return {"causal": bool(causal), "scale": scale, "weights": _weights_type(v, weights), **more}


def check_window(window: Any, softcap: Any) -> int:
    """The window of attention, 0 without one.

    Raises:
        ArgumentError: it or the cap of the scores is out of range.
    """
    window, softcap = 0 if window is None else as_size(window), 0.0 if softcap is None else float(softcap)
    if not isinstance(window, int) or window < 0 or not 0 <= softcap < math.inf:
        raise ArgumentError(
            "window or softcap of attention out of range",
            expected="a window of at least one key, a finite softcap > 0",
            received=f"window={window}, softcap={softcap}",
        )  # fmt: skip
    return window


def _weights_type(v: TensorType, weights: Any) -> DType:
    """The type to which weights are rounded: by default that of floats of 16 bits, else the compute type."""
    if weights is None:
        return v.dtype if v.dtype.bits == 16 else v.compute
    found = as_dtype(weights)
    if not found.is_float:
        raise DTypeError(f"weights of attention in {found}", expected="a float type, or None")
    return found


@op(coerce=_attention_coerce, canonical=complete_attributes)
def scaled_dot_product_attention(
    q, k, v, mask=None, *, causal: bool = False, scale: Any = None, weights: Any = None, window: Any = None,
    softcap: Any = None, enable_gqa: bool = True,
):  # fmt: skip
    """softmax(q kᵀ · scale + mask) v, for q [..., H, S, D], k and v [..., G, T, D]; other leading axes broadcast.

    G divides H: each head of keys and values is shared by H / G adjacent heads of queries (grouped queries, Ainslie et
    al. 2023). `enable_gqa=False` requires equal heads, or one that broadcasts. Without heads, q is [S, D].

    The mask [..., S, T] is added; a mask of bools is true where a query sees a key. A query that sees no key gives 0,
    as PyTorch's function does. `causal` hides key j from query i where j > i, and `window` where j <= i - window (a
    sliding window; None or 0: no window). `softcap` replaces scores, before the mask, by softcap · tanh(scores /
    softcap) (None or 0: not). `scale` is 1/sqrt(D) unless given. The unnormalised weights exp(score - maximum) are
    rounded to the type `weights` by `rough_cast` before the product with v. The default is the type of v if that has
    16 bits, as tensor cores need it; `weights=ts.f32` does not round. The divisor is the sum of the weights before
    rounding. PyTorch's names `attn_mask` and `is_causal` are `mask` and `causal`.

    >>> import tessera as ts
    >>> q, k = ts.zeros((4, 1, 8)), ts.zeros((2, 1, 8))
    >>> ts.scaled_dot_product_attention(q, k, ts.Tensor([[[1.0]], [[2.0]]])).reshape(4)
    Tensor([1., 1., 2., 2.], f32)

    Raises:
        ArgumentError: `window` is negative, or `softcap` is negative or not finite.
        DTypeError: `weights` is not a float type, or an operand has no floats.
        ShapeError: G does not divide H, D is 0, or other axes do not fit.
    """
    if k.ndim > 2 and k.shape[-3] != q.shape[-3]:
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    s = np.matmul(q, np.swapaxes(k, -1, -2)) * q.dtype.type(scale)
    s = softcap * np.tanh(s / s.dtype.type(softcap)) if softcap else s
    s = s if mask is None else s + mask
    distance = np.arange(q.shape[-2])[:, None] - np.arange(k.shape[-2])[None, :]
    if causal or window:
        seen = (distance >= 0 if causal else True) & (distance < window if window else True)
        s = np.where(seen, s, -np.inf).astype(s.dtype)
    most = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(most == -np.inf, s.dtype.type(0), most))
    total = np.sum(e, axis=-1, keepdims=True)
    found = np.matmul(e.astype(weights.numpy).astype(e.dtype), v)
    return found / np.where(total == 0, s.dtype.type(1), total)


@lower(scaled_dot_product_attention)
def _(q, k, v, mask=None, *, causal, scale, weights, window, softcap, enable_gqa):
    s = multiply_groups(q, transpose(k)) * scale
    s = tanh(s * (1.0 / softcap)) * softcap if softcap else s
    s = s if mask is None else s + mask
    s = hide_keys(s, causal, window)
    every = mask is None and not window  # each query sees a key, if there is one
    if s.shape[-1] == 0 or every:
        e = s if s.shape[-1] == 0 else exp(s - _find_shift(s))
    else:
        most = _find_shift(s)
        e = exp(s - where(equal(most, -math.inf), 0.0, most))
    narrow = e if weights == e.dtype else cast(rough_cast(e, dtype=weights), dtype=e.dtype)
    total = sum(e, axis=-1, keepdims=True)
    return multiply_groups(narrow, v) / (total if every and s.shape[-1] else where(equal(total, 0.0), 1.0, total))


def _find_shift(s: Tensor) -> Tensor:
    """The maximum of each row: a constant for derivatives, since the weights do not depend on what is subtracted."""
    return stop_gradient(max(s, axis=-1, keepdims=True))


def multiply_groups(x: Tensor, y: Tensor) -> Tensor:
    """x [..., H, S, K] times y [..., G, K, N]: the rows of the heads of a group are the rows of one product."""
    if y.ndim < 3 or x.shape[-3] == y.shape[-3]:
        return dot(x, y)
    (*outer, heads, length, depth), groups = x.shape, y.shape[-3]
    _check_groups(heads, groups)
    found = dot(reshape(x, shape=(*outer, groups, heads // groups * length, depth)), y)
    return reshape(found, shape=(*outer, heads, length, y.shape[-1]))


def hide_keys(s: Tensor, causal: bool, window: int) -> Tensor:
    """Scores with minus infinity where the key lies after the query, or before its window."""
    if not causal and not window:
        return s
    rows, cols = (iota(shape=s.shape[-2:], axis=a) for a in (-2, -1))
    s = where(less(rows, cols), -math.inf, s) if causal else s
    return where(greater_equal(rows, cols + window), -math.inf, s) if window else s


HEADS_SECOND_ORDER = (0, 2, 1, 3)  # exchange the axes of heads and positions


@op(coerce=_attention_coerce, canonical=complete_attributes)
def positional_attention(
    q, k, v, mask=None, *, causal: bool = False, scale: Any = None, weights: Any = None, window: Any = None,
    softcap: Any = None, enable_gqa: bool = True,
):  # fmt: skip
    """`scaled_dot_product_attention` with heads after positions: q [B, S, H, D], k and v [B, T, G, D].

    The mask is [B, H, S, T], where B, H and S may be 1. The result is [B, S, H, D].
    """
    turned = [np.transpose(x, HEADS_SECOND_ORDER) for x in (q, k, v)]
    attrs = {"causal": causal, "scale": scale, "weights": weights, "window": window, "softcap": softcap}
    return np.transpose(scaled_dot_product_attention.ref(*turned, mask, **attrs), HEADS_SECOND_ORDER)


@lower(positional_attention)
def _(q, k, v, mask=None, **attrs):
    turned = [permute(x, axes=HEADS_SECOND_ORDER) for x in (q, k, v)]
    return permute(scaled_dot_product_attention(*turned, mask, **attrs), axes=HEADS_SECOND_ORDER)


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


@batch(relu, sigmoid, silu, gelu, softmax, log_softmax, normalize)
def _(lanes, **attrs):
    # Axes count from the end, so that a leading one changes nothing.
    return bind_op(lanes.op, lanes.tensors, attrs)


@batch(scaled_dot_product_attention)
def _(lanes, **attrs):
    return bind_op(lanes.op, lanes.spread(), attrs)


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
