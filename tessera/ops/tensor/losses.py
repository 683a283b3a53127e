"""Losses: mean squared and absolute error, cross entropy, negative log likelihood (those of margins, distances and
sequences: tessera/ops/tensor/metric_losses.py)."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.activations import logsigmoid
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.elementwise import abs, equal, exp, greater_equal, less, log, not_equal, where
from tessera.ops.tensor.matrices import moveaxis
from tessera.ops.tensor.nn import log_softmax, softplus
from tessera.ops.tensor.reduce import mean, sum
from tessera.ops.tensor.shape import check_index, count_elements, expand_dims, iota

LOSS_REDUCTIONS: dict[str, Any] = {"mean": mean, "sum": sum, "none": lambda x: x}


def apply_reduction(x: Tensor, reduction: str) -> Tensor:
    """The losses of all examples reduced by "mean" or "sum", or themselves with "none".

    Raises:
        ArgumentError: another reduction.
    """
    if reduction not in LOSS_REDUCTIONS:
        raise ArgumentError(
            f"unknown reduction {reduction!r}", location=user_location(), expected=", ".join(LOSS_REDUCTIONS)
        )
    return LOSS_REDUCTIONS[reduction](x)


@composite
def mse(input: Any, target: Any) -> Tensor:
    """The mean of the squares of `input` - `target`: an alias of `mse_loss`."""
    return mse_loss(input, target)


@composite
def mse_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """The square of `input` - `target`, reduced by "mean", "sum" or "none".

    >>> mse_loss([1.0, 3.0], [0.0, 0.0])
    Tensor(5., f32)
    """
    distance = as_tensor(input) - as_tensor(target)
    return apply_reduction(distance * distance, reduction)


@composite
def l1_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """The magnitude of `input` - `target`, reduced by "mean", "sum" or "none"."""
    return apply_reduction(abs(as_tensor(input) - as_tensor(target)), reduction)


@composite
def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy: the negative log probability of `target` under the logits `input` [N, C, ...].

    `target` holds classes (integers, [N, ...]; `ignore_index` is ignored) or probabilities ([N, C, ...]).
    `weight` [C] scales classes; "mean" divides by the weights of the targets that count. `label_smoothing` moves
    that share of the probability evenly to all classes (Szegedy et al. 2016).

    >>> cross_entropy([[0.0, 0.0]], Tensor([1]))
    Tensor(0.6931472, f32)

    Raises:
        ShapeError: `target` is neither like `input` nor like it without axis 1.
        OutOfBoundsError: a class is out of range.
    """
    x, target = as_tensor(input), as_tensor(target)
    axis = 1 if x.ndim > 1 else 0
    logs, classes = moveaxis(log_softmax(x, axis=axis), axis, -1), int(x.shape[axis])
    w: Any = 1.0 if weight is None else as_tensor(weight)
    if target.dtype.is_float:
        share = moveaxis(_match_rank(target, x), axis, -1) * (1.0 - label_smoothing) + label_smoothing / classes
        losses = -sum(share * logs * w, axis=-1)
        return sum(losses) / count_elements(losses.shape) if reduction == "mean" else apply_reduction(losses, reduction)
    if target.shape != logs.shape[:-1]:
        raise ShapeError(
            "the classes do not fit the logits", location=user_location(), received=f"{x.type} and {target.type}",
            expected="classes: integers with the shape of the logits without the axis of the classes",
        )  # fmt: skip
    counts = not_equal(target, ignore_index)
    hot = _mark_classes(target, counts, classes, axis)
    scale = sum(where(hot, w, 0.0), axis=-1) if weight is not None else cast(counts, dtype=x.dtype)
    smooth = label_smoothing / classes
    losses = -(sum(where(hot, logs * w, 0.0), axis=-1) * (1.0 - label_smoothing))
    losses = where(counts, losses - sum(logs * w, axis=-1) * smooth if smooth else losses, 0.0)
    return sum(losses) / sum(scale) if reduction == "mean" else apply_reduction(losses, reduction)


def _mark_classes(target: Tensor, counts: Tensor, classes: int, axis: int) -> Tensor:
    """The class of each target that counts, as bools along a new last axis; a class out of range is an error."""
    checked = check_index(where(counts, target, 0), size=classes, along=axis, what="class", wrap=False)
    return equal(expand_dims(checked, -1), iota(shape=(classes,))) & expand_dims(counts, -1)


def _match_rank(target: Tensor, x: Tensor) -> Tensor:
    if target.shape != x.shape:
        raise ShapeError(
            "the probabilities do not fit", location=user_location(), received=f"{x.type} and {target.type}",
            expected="floats are probabilities, of the shape of the logits; classes are integers",
            suggestion="cast classes: target.to(ts.int64)",
        )  # fmt: skip
    return target


@composite
def nll_loss(input: Any, target: Any, weight: Any = None, reduction: str = "mean", ignore_index: int = -100) -> Tensor:
    """Minus the element of `input` [N, C, ...], log probabilities, at each class of `target` [N, ...].

    `weight` [C] scales classes, and "mean" divides by the weights of the targets that count: a target `ignore_index`
    counts as nothing.

    >>> nll_loss([[-1.0, -2.0], [-3.0, -4.0]], Tensor([1, -100]))
    Tensor(2., f32)

    Raises:
        ShapeError: `target` is not integers with the shape of `input` without axis 1.
        OutOfBoundsError: a class is out of range.
    """
    x, target = as_tensor(input), as_tensor(target)
    axis = 1 if x.ndim > 1 else 0
    logs = moveaxis(x, axis, -1) if x.ndim else x
    if not logs.ndim or target.shape != logs.shape[:-1] or not target.dtype.is_integer:
        raise ShapeError(
            "the classes do not fit the log probabilities",
            location=user_location(),
            expected="[N, C, ...] and integers [N, ...]",
            received=f"{x.type} and {target.type}",
        )
    hot = _mark_classes(target, not_equal(target, ignore_index), int(logs.shape[-1]), axis)
    w: Any = 1.0 if weight is None else as_tensor(weight)
    losses = -sum(where(hot, logs * w, 0.0), axis=-1)
    if reduction != "mean":
        return apply_reduction(losses, reduction)
    scale = sum(where(hot, w, 0.0) if weight is not None else cast(hot, dtype=x.dtype), axis=-1)
    return sum(losses) / sum(scale)


@composite
def huber_loss(input: Any, target: Any, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """Half the square of `input` - `target` up to `delta`, beyond it linear (Huber 1964); then its reduction.

    >>> huber_loss([0.0, 3.0], [0.5, 0.0], "none")
    Tensor([0.125, 2.5  ], f32)
    """
    distance = as_tensor(input) - as_tensor(target)
    size = abs(distance)
    far = greater_equal(size, delta)  # not of NaN, whose derivative is NaN
    inner = where(far, 0.0, distance)  # its square does not overflow, and is smooth at 0
    return apply_reduction(where(far, (size - 0.5 * delta) * delta, inner * inner * 0.5), reduction)


@composite
def smooth_l1_loss(input: Any, target: Any, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """`huber_loss` divided by `beta` (Girshick 2015): linear with slope 1 beyond `beta`; with `beta` 0 `l1_loss`.

    >>> smooth_l1_loss([0.0, 3.0], [0.5, 0.0], "none")
    Tensor([0.125, 2.5  ], f32)

    Raises:
        ArgumentError: `beta` is negative.
    """
    if beta < 0:
        raise ArgumentError(f"smooth_l1_loss with beta {beta}", location=user_location(), expected="beta ≥ 0")
    distance = as_tensor(input) - as_tensor(target)
    size = abs(distance)
    if beta == 0:
        return apply_reduction(size, reduction)
    far = greater_equal(size, beta)
    inner = where(far, 0.0, distance)
    return apply_reduction(where(far, size - 0.5 * beta, inner * inner * (0.5 / beta)), reduction)


@composite
def binary_cross_entropy(input: Any, target: Any, weight: Any = None, reduction: str = "mean") -> Tensor:
    """Minus the log probability of `target` (0 to 1) under probabilities `input`; logarithms stop at -100."""
    x, y = as_tensor(input), as_tensor(target)
    losses = -(y * _bounded_log(x) + (1.0 - y) * _bounded_log(1.0 - x))
    return apply_reduction(losses if weight is None else losses * weight, reduction)


def _bounded_log(x: Tensor) -> Tensor:
    """The logarithm, at least -100, where it is constant: no infinite derivative is multiplied by 0."""
    least = greater_equal(x, 0.0) & less(x, math.exp(-100.0))
    return where(least, -100.0, log(where(least, 1.0, x)))


@composite
def binary_cross_entropy_with_logits(
    input: Any, target: Any, weight: Any = None, reduction: str = "mean", pos_weight: Any = None
) -> Tensor:
    """`binary_cross_entropy` of the sigmoid of `input`, computed from the logits: it loses no digits.

    `pos_weight` scales the losses of positive targets.

    >>> binary_cross_entropy_with_logits([1000.0, 0.0], [1.0, 0.0], reduction="none")
    Tensor([0.       , 0.6931472], f32)
    """
    x, y = as_tensor(input), as_tensor(target)
    if pos_weight is None:
        losses = softplus(x) - x * y
    else:
        losses = (1.0 - y) * x - ((as_tensor(pos_weight) - 1.0) * y + 1.0) * logsigmoid(x)
    return apply_reduction(losses if weight is None else losses * weight, reduction)


@composite
def kl_div(input: Any, target: Any, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """target · (log target - input) for log probabilities `input`; where `target` is 0 that is 0.

    With `log_target`, `target` is the logarithm of the probabilities. "batchmean" divides the sum by the size of the
    first axis, which is the divergence of Kullback and Leibler (1951) for a batch of distributions.

    >>> kl_div([[0.0, 0.0]], [[0.5, 0.5]], "batchmean")
    Tensor(-0.6931472, f32)
    """
    logs, share = as_tensor(input), as_tensor(target)
    if log_target:
        losses = exp(share) * (share - logs)
    else:
        known = not_equal(share, 0.0)
        losses = where(known, share * (log(where(known, share, 1.0)) - logs), 0.0)
    if reduction == "batchmean":
        return sum(losses) / logs.shape[0]
    return apply_reduction(losses, reduction)
