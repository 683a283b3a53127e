"""Attention: scaled dot-product attention with masks, windows and groups of heads, with its lowering and batching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, TesseraError, user_location
from tessera.core.shapes import Size, as_size, broadcast, format_shape
from tessera.core.types import DType, TensorType, as_dtype
from tessera.ir.numerics.error_rules import bound_rough_cast
from tessera.ir.rules import STORAGE, batch, error, lower, op
from tessera.ir.tensor import Tensor, as_tensor, bind_op
from tessera.ops.tensor.basic import (
    broadcast_to,
    cast,
    check_operand_count,
    coerce_plain,
    stop_gradient,
)
from tessera.ops.tensor.coercion import promote_types
from tessera.ops.tensor.contractions import dot
from tessera.ops.tensor.elementwise import (
    equal,
    exp,
    greater_equal,
    less,
    tanh,
    where,
)
from tessera.ops.tensor.reduce import max, sum
from tessera.ops.tensor.shape import iota, permute, reshape, transpose


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
    if len(tensors) > 3 and not tensors[3].dtype.is_float:  # a mask of 0 and 1 would be added in silence
        raise DTypeError(
            "a mask of attention is bools or floats", received=str(tensors[3].type),
            expected="bools (True: the key is seen), or floats, which are added to the scores",
            suggestion="for a mask of 0 and 1: mask != 0",
        )  # fmt: skip
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

    The operands and attributes are those of `ts.scaled_dot_product_attention` (attention_calls.py), which adds lengths
    of caches and dropout.

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
    every = mask is None and not window  # each query sees a key, if there is one
    e, total, _ = exponentiate(hide_keys(s, causal, window), every)
    return multiply_groups(round_weights(e, weights), v) / total


def exponentiate(s: Tensor, every: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The exponentials of scores relative to a number for each row, their sums, and these numbers; a row without a key
    (there is none where `every` row has one) has the sum 1 and the number 0."""
    if s.shape[-1] == 0:
        total = sum(s, axis=-1, keepdims=True)
        return s, where(equal(total, 0.0), 1.0, total), total
    shift = _find_shift(s)
    shift = shift if every else where(equal(shift, -math.inf), 0.0, shift)
    e = exp(s - shift)
    total = sum(e, axis=-1, keepdims=True)
    return e, total if every else where(equal(total, 0.0), 1.0, total), shift


def round_weights(x: Tensor, weights: DType) -> Tensor:
    """Weights rounded to a type."""
    return x if weights == x.dtype else cast(rough_cast(x, dtype=weights), dtype=x.dtype)


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


@batch(scaled_dot_product_attention)
def _(lanes, **attrs):
    return bind_op(lanes.op, lanes.spread(), attrs)
