"""Layers: functions of neural networks with weights, statistics or random masks, after PyTorch's
`torch.nn.functional`: norms over groups of channels, bags of embeddings, bilinear maps, and dropout of channels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.types import f32
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import broadcast_to, cast, full
from tessera.ops.tensor.coercion import composite, unify_dtypes
from tessera.ops.tensor.contractions import einsum
from tessera.ops.tensor.elementwise import (
    equal,
    greater,
    greater_equal,
    less_equal,
    maximum,
    not_equal,
    rsqrt,
    where,
)  # fmt: skip
from tessera.ops.tensor.nn import check_channels, normalize
from tessera.ops.tensor.random import Generator, rand
from tessera.ops.tensor.rearrange import pad
from tessera.ops.tensor.reduce import find_neutral_element, max, sum
from tessera.ops.tensor.shape import embedding, expand_dims, iota, reshape

# Norms.


@composite
def group_norm(x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """Normalisation of `x` [B, C, ...] over groups of channels (Wu and He 2018), then `weight` and `bias` [C].

    >>> group_norm([[[0.0, 2.0], [10.0, 14.0]]], 2, eps=0.0)
    Tensor([[[-1.,  1.],
             [-1.,  1.]]], f32)

    Raises:
        ShapeError: the channels are no multiple of `num_groups`, or a weight is not [C].
    """
    x = as_tensor(x)
    check_channels("group_norm", x, weight=weight, bias=bias)
    if num_groups < 1 or x.shape[1] % num_groups:
        raise ShapeError(
            f"group_norm cannot divide the channels into {num_groups} groups", location=user_location(),
            expected=f"[B, C, ...] with C divisible by {num_groups}", received=str(x.type),
        )  # fmt: skip
    rows = normalize(reshape(x, shape=(x.shape[0], num_groups, -1)), axis=-1, eps=eps)
    return _scale_channels(reshape(rows, shape=x.shape), weight, bias)


def _scale_channels(out: Tensor, weight: Any, bias: Any) -> Tensor:
    shape = (out.shape[1], *(1 for _ in out.shape[2:]))
    out = out if weight is None else out * reshape(weight, shape=shape)
    return out if bias is None else out + reshape(bias, shape=shape)


@composite
def instance_norm(
    x: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalisation of each channel of each example of `x` [B, C, ...] (Ulyanov, Vedaldi and Lempitsky 2016).

    Without `use_input_stats` the mean and variance are `running_mean` and `running_var` [C]. Then `weight` and `bias`
    [C] apply.

    >>> instance_norm([[[0.0, 2.0], [10.0, 14.0]]], eps=0.0)
    Tensor([[[-1.,  1.],
             [-1.,  1.]]], f32)

    Raises:
        ShapeError: `x` has no spatial axis of more than one element, or a statistic or weight is not [C].
        ArgumentError: the running statistics are needed, and missing.
    """
    x = as_tensor(x)
    each = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    check_channels("instance_norm", x, **each)
    if not use_input_stats:
        if running_mean is None or running_var is None:
            raise ArgumentError("instance_norm needs running statistics, or use_input_stats", location=user_location())
        shape = (x.shape[1], *(1 for _ in x.shape[2:]))
        middle, spread = (reshape(t, shape=shape) for t in unify_dtypes([running_mean, running_var]))
        return _scale_channels((x - middle) * rsqrt(spread + eps), weight, bias)
    if x.ndim < 3 or math.prod(x.shape[2:]) == 1:
        raise ShapeError(
            "instance_norm needs more than one element for each channel", location=user_location(),
            expected="[B, C, ...] with spatial axes", received=str(x.type),
        )  # fmt: skip
    return _scale_channels(normalize(x, axis=tuple(range(2, x.ndim)), eps=eps), weight, bias)


@composite
def local_response_norm(x: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    """`x` [B, C, ...] divided by (k + alpha · the mean of the squares of `size` channels around)^beta.

    Channels beyond the ends count as 0 (Krizhevsky, Sutskever and Hinton 2012).

    >>> local_response_norm([[[1.0], [2.0]]], 2, alpha=2.0, beta=1.0)
    Tensor([[[0.5       ],
             [0.33333334]]], f32)

    Raises:
        ShapeError: `x` has less than three axes.
    """
    x = as_tensor(x)
    if x.ndim < 3 or size < 1:
        raise ShapeError(
            f"local_response_norm over {size} channels does not fit", location=user_location(), received=str(x.type),
            expected="[B, C, ...] with a spatial axis, and a size above 0",
        )  # fmt: skip
    around = ((0, 0), (size // 2, (size - 1) // 2), *((0, 0) for _ in x.shape[2:]))
    squares = pad(x * x, around)
    total = squares[:, : x.shape[1]]
    for i in range(1, size):
        total = total + squares[:, i : i + x.shape[1]]
    return x / (total * (alpha / size) + k) ** beta


# Maps.


@composite
def bilinear(x1: Any, x2: Any, weight: Any, bias: Any = None) -> Tensor:
    """x1ᵀ · weight[o] · x2 for each o: `x1` [..., I], `x2` [..., J], `weight` [O, I, J], `bias` [O].

    >>> bilinear([1.0, 2.0], [3.0], [[[1.0], [10.0]]])
    Tensor([63.], f32)

    Raises:
        ShapeError: the sizes do not fit.
    """
    out = einsum("...i,oij,...j->...o", x1, weight, x2)
    return out if bias is None else out + bias


BAG_MODES = ("mean", "sum", "max")


@composite
def embedding_bag(
    weight: Any, indices: Any, offsets: Any = None, mode: str = "mean", per_sample_weights: Any = None,
    padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """The mean, sum or maximum of the rows of `weight` [V, D] in each bag of `indices`: [bags, D].

    A row of `indices` [bags, L] is a bag; of `indices` [N] a bag begins at each of `offsets` [bags], the first at 0.
    `per_sample_weights`, with the shape of the indices, scales the rows (mode "sum"). Index `padding_idx` counts as
    nothing. An empty bag is 0.

    >>> embedding_bag([[1.0], [10.0], [100.0]], Tensor([0, 1, 2]), Tensor([0, 2]), "sum")
    Tensor([[ 11.],
            [100.]], f32)

    Raises:
        ShapeError: the indices, offsets and weights do not fit.
        ArgumentError: an unknown mode, or `per_sample_weights` with another mode than "sum".
    """
    table, at = as_tensor(weight), as_tensor(indices)
    if mode not in BAG_MODES or (per_sample_weights is not None and mode != "sum"):
        raise ArgumentError(
            f"embedding_bag with mode {mode!r}", location=user_location(),
            expected="mean, sum or max; sum with per_sample_weights",
        )  # fmt: skip
    scale = None if per_sample_weights is None else as_tensor(per_sample_weights)
    _check_bags(table, at, offsets, scale)
    rows = embedding(table, at)
    rows = rows if scale is None else rows * expand_dims(scale, -1)
    counts = full(shape=at.shape, value=True, dtype="bool") if padding_idx is None else not_equal(at, padding_idx)
    if at.ndim == 1:
        member = _find_members(as_tensor(offsets), at.shape[0])
        counts = member & counts
        rows = broadcast_to(rows, shape=(member.shape[0], *rows.shape))
    return BAG_RULES[mode](rows, expand_dims(counts, -1))


def _check_bags(table: Tensor, at: Tensor, offsets: Any, scale: Tensor | None) -> None:
    right = table.ndim == 2 and at.dtype.is_integer and at.ndim == (2 if offsets is None else 1)
    right = right and (offsets is None or as_tensor(offsets).ndim == 1)
    if not right or (scale is not None and scale.shape != at.shape):
        raise ShapeError(
            "embedding_bag does not fit", location=user_location(), received=f"{table.type} and {at.type}",
            expected="[V, D] and integers [bags, L], or [N] with offsets [bags]; one weight for each index",
        )  # fmt: skip


def _find_members(offsets: Tensor, size: Any) -> Tensor:
    """Whether each of `size` elements is in each bag: [bags, size]."""
    place = iota(shape=(size,), dtype=offsets.dtype)
    bag = sum(cast(less_equal(expand_dims(offsets, -1), place), dtype=offsets.dtype), axis=0) - 1
    return equal(iota(shape=(offsets.shape[0], 1), axis=-2, dtype=bag.dtype), bag)


def _average_bags(rows: Tensor, counts: Tensor) -> Tensor:
    return _add_bags(rows, counts) / maximum(sum(cast(counts, dtype=rows.dtype), axis=-2), 1.0)


def _add_bags(rows: Tensor, counts: Tensor) -> Tensor:
    return sum(where(counts, rows, 0.0), axis=-2)


def _maximise_bags(rows: Tensor, counts: Tensor) -> Tensor:
    largest = max(where(counts, rows, find_neutral_element("max", rows.dtype)), axis=-2)
    return where(greater(sum(cast(counts, dtype=f32), axis=-2), 0.0), largest, 0.0)


BAG_RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _average_bags,
    "sum": _add_bags,
    "max": _maximise_bags,
}


# Dropout of channels, and dropout that keeps the mean and variance of `selu`.


@check_arguments
def dropout1d(x: Any, p: float = 0.5, training: bool = True, generator: Generator | None = None) -> Tensor:
    """`x` [B, C, W] with each channel set to 0 with probability `p` and the others scaled by 1 / (1 - p).

    >>> dropout1d([[[1.0, 2.0]]], training=False)
    Tensor([[[1., 2.]]], f32)
    """
    return _drop_channels("dropout1d", 3, x, p, training, generator)


@check_arguments
def dropout2d(x: Any, p: float = 0.5, training: bool = True, generator: Generator | None = None) -> Tensor:
    """`x` [B, C, H, W] with each channel set to 0 with probability `p` and the others scaled by 1 / (1 - p).

    >>> dropout2d([[[[1.0, 2.0]]]], training=False)
    Tensor([[[[1., 2.]]]], f32)
    """
    return _drop_channels("dropout2d", 4, x, p, training, generator)


@check_arguments
def dropout3d(x: Any, p: float = 0.5, training: bool = True, generator: Generator | None = None) -> Tensor:
    """`x` [B, C, D, H, W] with each channel set to 0 with probability `p` and the others scaled by 1 / (1 - p).

    >>> dropout3d([[[[[1.0, 2.0]]]]], training=False)
    Tensor([[[[[1., 2.]]]]], f32)
    """
    return _drop_channels("dropout3d", 5, x, p, training, generator)


def _drop_channels(name: str, rank: int, x: Any, p: float, training: bool, generator: Generator | None) -> Tensor:
    x = as_tensor(x)
    if x.ndim != rank:
        raise ShapeError(f"{name} takes {rank} axes, [B, C, ...]", location=user_location(), received=str(x.type))
    kept = _draw_mask(name, (*x.shape[:2], *(1,) * (rank - 2)), p, generator) if training and p != 0 else None
    return x if kept is None else where(kept, x * (1.0 / (1.0 - p) if p < 1 else 1.0), 0.0)


def _draw_mask(name: str, shape: Any, p: float, generator: Generator | None) -> Tensor:
    if not 0 <= p <= 1:
        raise ArgumentError(f"{name} with probability {p}", location=user_location(), expected="0 to 1")
    return greater_equal(rand(shape, dtype=f32, generator=generator), p)


DROPPED_VALUE = -1.7580993408473766  # the limit of selu at minus infinity


@composite
def alpha_dropout(x: Any, p: float = 0.5, training: bool = True, generator: Generator | None = None) -> Tensor:
    """Dropout for `selu`: each element is -1.7581 with probability `p`, then an affine map restores mean and variance.

    Of elements with mean 0 and variance 1 (Klambauer et al. 2017).

    >>> alpha_dropout([1.0, 2.0], training=False)
    Tensor([1., 2.], f32)
    """
    x = as_tensor(x)
    return _replace_dropped("alpha_dropout", x, x.shape, p, generator) if training and p != 0 else x


@composite
def feature_alpha_dropout(x: Any, p: float = 0.5, training: bool = True, generator: Generator | None = None) -> Tensor:
    """`alpha_dropout` of whole channels of `x` [B, C, ...].

    >>> feature_alpha_dropout([[1.0, 2.0]], training=False)
    Tensor([[1., 2.]], f32)
    """
    x = as_tensor(x)
    if x.ndim < 2:
        raise ShapeError("feature_alpha_dropout takes [B, C, ...]", location=user_location(), received=str(x.type))
    shape = (*x.shape[:2], *(1 for _ in x.shape[2:]))
    return _replace_dropped("feature_alpha_dropout", x, shape, p, generator) if training and p != 0 else x


def _replace_dropped(name: str, x: Tensor, shape: Any, p: float, generator: Generator | None) -> Tensor:
    kept = _draw_mask(name, shape, p, generator)
    if p == 1:
        return x * 0.0
    scale = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * DROPPED_VALUE**2))
    return where(kept, x, DROPPED_VALUE) * scale + (-scale * DROPPED_VALUE * p)
