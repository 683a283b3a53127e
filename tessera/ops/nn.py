"""Composites of neural networks: each has NumPy semantics and a lowering into other ops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.errors import DTypeError, ShapeError, TesseraError, here
from tessera.numerics.bounds import roughly_converted
from tessera.numerics.special import erf as erf_of
from tessera.op import STORAGE, error, lower, op
from tessera.ops.arguments import shape_of, typed
from tessera.ops.basic import cast, check_count, plain
from tessera.ops.coerce import floating, promote
from tessera.ops.elementwise import erf, exp, less, log, maximum, rsqrt, tanh, where
from tessera.ops.linalg import dot
from tessera.ops.reduce import max, mean, sum
from tessera.ops.shape import iota, permute, transpose
from tessera.shapes import as_size, normalize_axes, normalize_axis
from tessera.shapes.rules import show
from tessera.tensor import Tensor, as_tensor, bind
from tessera.types import DType, TensorType, as_dtype

SQRT_HALF = math.sqrt(0.5)
GELU_SCALE = math.sqrt(2 / math.pi)


def _axis(x: TensorType, *, axis: int) -> dict[str, Any]:
    return {"axis": normalize_axis(axis, x.rank)}


@op(coerce=floating)
def relu(x):
    """`x` where it is positive, else 0."""
    return np.maximum(x, 0)


@lower(relu)
def _(x):
    return maximum(x, 0.0)


@op(coerce=floating)
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


@lower(sigmoid)
def _(x):
    return 1.0 / (1.0 + exp(-x))


@op(coerce=floating)
def silu(x):
    """`x` times its sigmoid (swish)."""
    return x / (1 + np.exp(-x))


@lower(silu)
def _(x):
    return x / (1.0 + exp(-x))


@op(coerce=floating)
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


@op(coerce=floating, canonical=_axis)
def softmax(x, *, axis: int = -1):
    """exp(x) over its sum along `axis`, computed from the distance to the maximum."""
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / np.sum(e, axis=axis, keepdims=True)


@lower(softmax)
def _(x, *, axis):
    e = exp(x - max(x, axis=axis, keepdims=True))
    return e / sum(e, axis=axis, keepdims=True)


@op(coerce=floating, canonical=_axis)
def log_softmax(x, *, axis: int = -1):
    """The logarithm of softmax, computed without forming it."""
    shifted = x - np.max(x, axis=axis, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))


@lower(log_softmax)
def _(x, *, axis):
    shifted = x - max(x, axis=axis, keepdims=True)
    return shifted - log(sum(exp(shifted), axis=axis, keepdims=True))


def _normalize_attrs(x: TensorType, *, axis: Any, eps: float, center: bool) -> dict[str, Any]:
    return {"axis": normalize_axes(axis, x.rank), "eps": float(eps), "center": bool(center)}


@op(coerce=floating, canonical=_normalize_attrs)
def normalize(x, *, axis: Any = -1, eps: float = 1e-5, center: bool = True):
    """`x` scaled to unit mean square along `axis`, after its mean is taken away if `center`."""
    d = x - np.mean(x, axis=axis, keepdims=True) if center else x
    return d / np.sqrt(np.mean(d * d, axis=axis, keepdims=True) + x.dtype.type(eps))


@lower(normalize)
def _(x, *, axis, eps, center):
    d = x - mean(x, axis=axis, keepdims=True) if center else x
    return d * rsqrt(mean(d * d, axis=axis, keepdims=True) + eps)


@typed
def layer_norm(x: Any, normalized_shape: Any = None, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """Layer normalisation over the last axes (Ba, Kiros and Hinton 2016), then `weight` and `bias`.

    `normalized_shape` names the trailing sizes; it may be left out where the last axis alone is meant.

    >>> layer_norm([[0.0, 2.0]], 2, eps=0.0)
    Tensor([[-1.,  1.]], f32)

    Raises:
        ShapeError: `x` does not end in `normalized_shape`.
    """
    return _scaled(normalize(x, axis=_trailing(x, normalized_shape), eps=eps), weight, bias)


@typed
def rms_norm(x: Any, weight: Any = None, eps: float = 1e-5) -> Tensor:
    """Root mean square normalisation over the last axis (Zhang and Sennrich 2019), then `weight`."""
    return _scaled(normalize(x, axis=-1, eps=eps, center=False), weight, None)


def _trailing(x: Any, normalized_shape: Any) -> tuple[int, ...]:
    if normalized_shape is None:
        return (-1,)
    wanted, shape = shape_of(normalized_shape, as_size), as_tensor(x).shape
    last = shape[len(shape) - len(wanted) :]
    if len(wanted) > len(shape) or any(n != size for n, size in zip(wanted, last, strict=True)):
        raise ShapeError(
            "layer_norm over other sizes than the last ones", location=here(),
            expected=f"a shape that ends in {show(wanted)}", received=show(shape),
        )  # fmt: skip
    return tuple(range(-len(wanted), 0))


def _scaled(out: Tensor, weight: Any, bias: Any) -> Tensor:
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def _attention_coerce(op, operands, attrs):
    given = [x for x in operands if x is not None]
    check_count(op, [*given, *[None] * (len(op.operands) - len(given))] if len(given) >= 3 else given)
    tensors = [as_tensor(x) for x in given]
    try:
        promote([t.type for t in tensors])
        return bind(op, tensors, attrs)
    except TesseraError as error:
        raise error.at(here()) from None


@op(infer=lambda x, *, dtype: x.with_dtype(dtype), coerce=plain, numerics=STORAGE)
def rough_cast(x, *, dtype: DType):
    """`x` in a narrower float type, to nearest even; what lies below the least normal f32 may become 0."""
    return x.astype(dtype.numpy)


error(rough_cast)(roughly_converted)


@lower(rough_cast)
def _(x, *, dtype):
    return cast(x, dtype=dtype)


def _attention_attrs(
    q: TensorType, k: TensorType, v: TensorType, *mask: TensorType, causal, scale, weights
) -> dict[str, Any]:
    for each in (q, k, v):
        if each.rank < 2 or not each.dtype.is_float:
            raise ShapeError("attention takes [..., S, D] of floats", received=str(each))
    if q.shape[-1] == 0:
        raise ShapeError("attention over no features", received=str(q))
    scale = float(scale) if scale is not None else 1 / math.sqrt(int(q.shape[-1]))
    return {"causal": bool(causal), "scale": scale, "weights": _weights_type(v, weights)}


def _weights_type(v: TensorType, weights: Any) -> DType:
    """What weights are rounded to: by default the type of floats of 16 bits, else what they are computed in."""
    if weights is None:
        return v.dtype if v.dtype.bits == 16 else v.compute
    found = as_dtype(weights)
    if not found.is_float:
        raise DTypeError(f"weights of attention in {found}", expected="a float type, or None")
    return found


@op(coerce=_attention_coerce, canonical=_attention_attrs)
def scaled_dot_product_attention(q, k, v, mask=None, *, causal: bool = False, scale: Any = None, weights: Any = None):
    """softmax(q kᵀ · scale + mask) v, for q [..., S, D], k and v [..., T, D], mask [..., S, T] (added).

    `causal` hides key j from query i where j > i. `scale` is 1/sqrt(D) unless given. The powers of e that v is
    multiplied by, of scores less their maximum, are rounded to the type `weights` by `rough_cast`: to that of v if it
    is a float of 16 bits, as tensor cores take it, unless another is given (`weights=ts.f32`: they are not rounded).
    The sum that the product is divided by is that of the powers as they were.
    """
    s = np.matmul(q, np.swapaxes(k, -1, -2)) * q.dtype.type(scale)
    s = s if mask is None else s + mask
    if causal:
        seen = np.arange(k.shape[-2])[None, :] <= np.arange(q.shape[-2])[:, None]
        s = np.where(seen, s, -np.inf).astype(s.dtype)
    e = np.exp(s - np.max(s, axis=-1, keepdims=True))
    return np.matmul(e.astype(weights.numpy).astype(e.dtype), v) / np.sum(e, axis=-1, keepdims=True)


@lower(scaled_dot_product_attention)
def _(q, k, v, mask=None, *, causal, scale, weights):
    s = dot(q, transpose(k)) * scale
    s = s if mask is None else s + mask
    if causal:
        shape = s.shape[-2:]
        later = less(iota(shape=shape, axis=-2), iota(shape=shape, axis=-1))
        s = where(later, -math.inf, s)
    e = exp(s - max(s, axis=-1, keepdims=True))
    narrow = e if weights == e.dtype else cast(rough_cast(e, dtype=weights), dtype=e.dtype)
    return dot(narrow, v) / sum(e, axis=-1, keepdims=True)


HEADS_BACK = (0, 2, 1, 3)  # heads and positions change places


@op(coerce=_attention_coerce, canonical=_attention_attrs)
def positional_attention(q, k, v, mask=None, *, causal: bool = False, scale: Any = None, weights: Any = None):
    """`scaled_dot_product_attention` with heads after positions: q [B, S, H, D], k and v [B, T, H, D].

    The mask is as there: [B, H, S, T], any of them 1 but T. The result is [B, S, H, D].
    """
    turned = [np.transpose(x, HEADS_BACK) for x in (q, k, v)]
    found = scaled_dot_product_attention.ref(*turned, mask, causal=causal, scale=scale, weights=weights)
    return np.transpose(found, HEADS_BACK)


@lower(positional_attention)
def _(q, k, v, mask=None, *, causal, scale, weights):
    turned = [permute(x, axes=HEADS_BACK) for x in (q, k, v)]
    found = scaled_dot_product_attention(*turned, mask, causal=causal, scale=scale, weights=weights)
    return permute(found, axes=HEADS_BACK)
