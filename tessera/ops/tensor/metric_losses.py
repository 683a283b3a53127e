"""Distances, and losses of margins and distances, after PyTorch's `torch.nn.functional`: hinge, triplet and
multi-label losses, likelihoods of Poisson and normal distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.types import int64
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.coercion import broadcast_operands, composite, unify_dtypes
from tessera.ops.tensor.contractions import linear
from tessera.ops.tensor.elementwise import (
    equal,
    exp,
    greater,
    less,
    log,
    maximum,
    minimum,
    not_equal,
    sqrt,
    where,
)  # fmt: skip
from tessera.ops.tensor.losses import apply_reduction, cross_entropy
from tessera.ops.tensor.nn import softplus
from tessera.ops.tensor.reduce import any, cumsum, mean, norm, sum
from tessera.ops.tensor.shape import expand_dims, gather, iota

# Distances.


@composite
def cosine_similarity(x1: Any, x2: Any, axis: int = 1, eps: float = 1e-8) -> Tensor:
    """The cosine of the angle between the vectors of `x1` and `x2` along `axis`; norms count as at least `eps`.

    >>> cosine_similarity([[1.0, 0.0]], [[3.0, 4.0]])
    Tensor([0.6], f32)
    """
    x, y = broadcast_operands(unify_dtypes([as_tensor(x1), as_tensor(x2)]))
    scaled = [v / maximum(norm(v, axis=axis, keepdims=True), eps) for v in (x, y)]
    return sum(scaled[0] * scaled[1], axis=axis)


@composite
def pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdims: bool = False) -> Tensor:
    """The `p`-norm of `x1` - `x2` + `eps` along the last axis.

    >>> pairwise_distance([[4.0, 5.0]], [[1.0, 1.0]], eps=0.0)
    Tensor([5.], f32)
    """
    return norm(as_tensor(x1) - as_tensor(x2) + eps, p, axis=-1, keepdims=keepdims)


@composite
def pdist(x: Any, p: float = 2.0) -> Tensor:
    """The `p`-norms of the differences of all pairs of rows of `x` [N, M]: [N·(N − 1)/2], as SciPy's `pdist` has them.

    >>> pdist([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    Tensor([5.       , 1.       , 4.2426405], f32)

    Raises:
        ShapeError: `x` is not a matrix.
    """
    x = as_tensor(x)
    if x.ndim != 2:
        raise ShapeError("pdist takes [N, M]", location=user_location(), received=str(x.type))
    first, second = (Tensor(i) for i in np.triu_indices(int(x.shape[0]), 1))
    return norm(gather(x, first, axis=0) - gather(x, second, axis=0), p, axis=-1)


@composite
def lp_normalize(x: Any, p: float = 2.0, axis: int = 1, eps: float = 1e-12) -> Tensor:
    """`x` divided by its `p`-norm along `axis`, which counts as at least `eps` (`normalize` of PyTorch).

    >>> lp_normalize([[3.0, 4.0]])
    Tensor([[0.6, 0.8]], f32)
    """
    x = as_tensor(x)
    return x / maximum(norm(x, p, axis=axis, keepdims=True), eps)


# Losses of one number for each element.


@composite
def soft_margin_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """log(1 + exp(-target · input)) for targets 1 and -1.

    >>> soft_margin_loss([0.0, 1000.0], [1.0, 1.0], "none")
    Tensor([0.6931472, 0.       ], f32)
    """
    return apply_reduction(softplus(-(as_tensor(input) * as_tensor(target))), reduction)


@composite
def hinge_embedding_loss(input: Any, target: Any, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    """`input` where `target` is 1, and max(0, margin - input) where it is -1.

    >>> hinge_embedding_loss([0.25, 0.25], [1.0, -1.0], reduction="none")
    Tensor([0.25, 0.75], f32)
    """
    x, y = as_tensor(input), as_tensor(target)
    far = where(not_equal(y, 1), maximum(margin - x, 0.0), 0.0)
    return apply_reduction(far + where(not_equal(y, -1), x, 0.0), reduction)


@composite
def poisson_nll_loss(
    input: Any, target: Any, log_input: bool = True, full: bool = False, eps: float = 1e-8, reduction: str = "mean"
) -> Tensor:
    """The negative log likelihood of counts `target` under a Poisson distribution with the mean exp(input).

    Without `log_input` the mean is `input`, and `eps` is added within its logarithm. `full` adds Stirling's
    approximation of log(target!) where `target` is above 1.

    >>> poisson_nll_loss([0.0], [2.0])
    Tensor(1., f32)
    """
    x, y = as_tensor(input), as_tensor(target)
    losses = exp(x) - y * x if log_input else x - y * log(x + eps)
    if full:
        many = where(greater(y, 1.0), y, 1.0)
        factorial = many * log(many) - many + 0.5 * log(2.0 * math.pi * many)
        losses = losses + where(greater(y, 1.0), factorial, 0.0)
    return apply_reduction(losses, reduction)


@composite
def gaussian_nll_loss(
    input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """The negative log likelihood of `target` under normal distributions with mean `input` and variance `var`.

    `var` broadcasts to `input`, or lacks its last axis; variances count as at least `eps`. `full` adds log(2π)/2.

    >>> gaussian_nll_loss([1.0], [3.0], [4.0])
    Tensor(1.1931472, f32)
    """
    x, y, spread = unify_dtypes([as_tensor(input), as_tensor(target), as_tensor(var)])
    if spread.ndim and spread.ndim == x.ndim - 1 and spread.shape == x.shape[:-1]:
        spread = expand_dims(spread, -1)
    spread = maximum(spread, eps)
    losses = 0.5 * (log(spread) + (x - y) * (x - y) / spread)
    return apply_reduction(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)


# Losses of pairs and triples.


@composite
def margin_ranking_loss(input1: Any, input2: Any, target: Any, margin: float = 0.0, reduction: str = "mean") -> Tensor:
    """max(0, -target · (input1 - input2) + margin): `target` is 1 where `input1` should rank higher, else -1.

    >>> margin_ranking_loss([1.0, 1.0], [0.5, 0.5], [1.0, -1.0], reduction="none")
    Tensor([0. , 0.5], f32)
    """
    apart = as_tensor(input1) - as_tensor(input2)
    return apply_reduction(maximum(margin - as_tensor(target) * apart, 0.0), reduction)


@composite
def cosine_embedding_loss(
    input1: Any, input2: Any, target: Any, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """1 - cos for `target` 1 and max(0, cos - margin) for -1, of the vectors along the last axis.

    >>> cosine_embedding_loss([[1.0, 0.0]], [[0.6, 0.8]], [1.0])
    Tensor(0.39999998, f32)
    """
    x, y, sides = as_tensor(input1), as_tensor(input2), as_tensor(target)
    tiny = 1e-12
    sizes = (sum(x * x, axis=-1) + tiny) * (sum(y * y, axis=-1) + tiny)
    cosine = sum(x * y, axis=-1) / sqrt(sizes)
    near, far = where(equal(sides, 1), 1.0 - cosine, 0.0), maximum(cosine - margin, 0.0)
    return apply_reduction(near + where(equal(sides, -1), far, 0.0), reduction)


@composite
def triplet_margin_loss(
    anchor: Any, positive: Any, negative: Any, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6,
    swap: bool = False, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """max(0, d(anchor, positive) - d(anchor, negative) + margin), with d = `pairwise_distance` (Balntas et al. 2016).

    With `swap` the distance of `positive` and `negative` counts where it is smaller than that of `anchor` and
    `negative`.

    >>> triplet_margin_loss([[0.0]], [[2.0]], [[2.5]], eps=0.0)
    Tensor(0.5, f32)
    """
    distance = lambda x, y: pairwise_distance(x, y, p, eps)  # noqa: E731
    return triplet_margin_with_distance_loss(
        anchor, positive, negative, distance_function=distance, margin=margin, swap=swap, reduction=reduction
    )


@composite
def triplet_margin_with_distance_loss(
    anchor: Any, positive: Any, negative: Any, *, distance_function: Callable[[Any, Any], Any] | None = None,
    margin: float = 1.0, swap: bool = False, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """`triplet_margin_loss` with another distance; by default `pairwise_distance`.

    >>> triplet_margin_with_distance_loss([0.0], [2.0], [2.5], distance_function=lambda x, y: (x - y) ** 2)
    Tensor(0., f32)
    """
    distance = distance_function or pairwise_distance
    a, b, c = as_tensor(anchor), as_tensor(positive), as_tensor(negative)
    far = distance(a, c)
    far = minimum(far, distance(b, c)) if swap else far
    return apply_reduction(maximum(distance(a, b) - far + margin, 0.0), reduction)


# Losses of classes.


@composite
def multi_margin_loss(
    input: Any, target: Any, p: int = 1, margin: float = 1.0, weight: Any = None, reduction: str = "mean"
) -> Tensor:
    """The mean over classes i ≠ y of max(0, margin - input[y] + input[i])^p, for `input` [N, C] and classes y [N].

    `weight` [C] scales the loss of each class y; p is 1 or 2.

    >>> multi_margin_loss([[0.5, 0.25]], Tensor([0]))
    Tensor(0.375, f32)

    Raises:
        ShapeError: `target` is not integers with the shape of `input` without its last axis.
    """
    x, y = as_tensor(input), as_tensor(target)
    if p not in (1, 2):
        raise ArgumentError(f"multi_margin_loss with p = {p}", location=user_location(), expected="1 or 2")
    if not x.ndim or y.shape != x.shape[:-1] or not y.dtype.is_integer:
        raise ShapeError(
            "the classes do not fit the scores", location=user_location(), received=f"{x.type} and {y.type}",
            expected="[N, C] and integers [N]",
        )  # fmt: skip
    hot = equal(expand_dims(y, -1), iota(shape=(x.shape[-1],), dtype=y.dtype))
    room = maximum(margin - sum(where(hot, x, 0.0), axis=-1, keepdims=True) + x, 0.0)
    room = room if p == 1 else room * room
    scaled = room if weight is None else room * sum(where(hot, as_tensor(weight), 0.0), axis=-1, keepdims=True)
    return apply_reduction(mean(where(hot, 0.0, scaled), axis=-1), reduction)


@composite
def multilabel_margin_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """The sum over classes y of `target` and classes i not among them of max(0, 1 - input[y] + input[i]) / C.

    `input` is [N, C]; each row of `target` [N, C] lists classes, up to the first -1.

    >>> multilabel_margin_loss([[0.5, 0.25]], Tensor([[1, -1]]))
    Tensor(0.625, f32)

    Raises:
        ShapeError: `target` is not integers with the shape of `input`.
    """
    x, y = as_tensor(input), as_tensor(target)
    if x.shape != y.shape or not x.ndim or not y.dtype.is_integer:
        raise ShapeError(
            "the classes do not fit the scores", location=user_location(), received=f"{x.type} and {y.type}",
            expected="integers with the shape of the scores",
        )  # fmt: skip
    listed = equal(cumsum(cast(less(y, 0), dtype=int64), axis=-1), 0)
    hot = equal(expand_dims(y, -1), iota(shape=(x.shape[-1],), dtype=y.dtype)) & expand_dims(listed, -1)
    chosen = sum(where(hot, expand_dims(x, -2), 0.0), axis=-1, keepdims=True)
    counts = expand_dims(listed, -1) & equal(expand_dims(any(hot, axis=-2), -2), False)
    room = maximum(1.0 - chosen + expand_dims(x, -2), 0.0)
    return apply_reduction(sum(where(counts, room, 0.0), axis=(-2, -1)) / x.shape[-1], reduction)


@composite
def multilabel_soft_margin_loss(input: Any, target: Any, weight: Any = None, reduction: str = "mean") -> Tensor:
    """The mean over classes of the binary cross entropy of logits `input` [N, C] with `target`, scaled by `weight`.

    >>> multilabel_soft_margin_loss([[0.0, 0.0]], [[1.0, 0.0]])
    Tensor(0.6931472, f32)
    """
    x, y = as_tensor(input), as_tensor(target)
    losses = y * softplus(-x) + (1.0 - y) * softplus(x)
    return apply_reduction(mean(losses if weight is None else losses * weight, axis=-1), reduction)


@composite
def linear_cross_entropy(
    input: Any, linear_weight: Any, target: Any, linear_bias: Any = None, weight: Any = None,
    reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """`cross_entropy` of the logits linear(input, linear_weight, linear_bias), for `input` [N, D] and classes [N].

    `linear_weight` is [D, C], as in `linear`.

    >>> linear_cross_entropy([[1.0]], [[2.0, 2.0]], Tensor([1]))
    Tensor(0.6931472, f32)
    """
    logits = linear(input, linear_weight, linear_bias)
    return cross_entropy(logits, target, weight, reduction, ignore_index, label_smoothing)
