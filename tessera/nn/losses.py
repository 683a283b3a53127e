"""Losses as modules, with PyTorch's names and defaults; the functions are those of `ts`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn import sequence_losses
from tessera.nn.module import Module
from tessera.ops.tensor import losses, metric_losses
from tessera.ops.tensor.losses import LOSS_REDUCTIONS


class Reduction:
    """The names of the reductions of losses.

    >>> Reduction.MEAN
    'mean'
    """

    NONE, MEAN, SUM = "none", "mean", "sum"


class Loss(Module):
    """A loss function with its options; both arguments of elementwise losses have one shape."""

    function: Callable[..., Any]
    elementwise = True
    reductions: tuple[str, ...] = tuple(LOSS_REDUCTIONS)

    def __init__(self, reduction: str = "mean") -> None:
        self.set_options(reduction)

    def set_options(self, reduction: str, **options: Any) -> None:
        """Keep the reduction and the other options of the function.

        Raises:
            ArgumentError: there is no such reduction.
        """
        if reduction not in self.reductions:
            raise ArgumentError(
                f"unknown reduction {reduction!r}", location=user_location(), expected=", ".join(self.reductions)
            )
        self.reduction, self.options = reduction, tuple(options.items())

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """The loss of the predictions and the targets, which may be given by the names of the function."""
        inputs = order_arguments(type(self).function, inputs, named)
        given = check_shapes(*inputs) if self.elementwise else [as_tensor(x) for x in inputs]
        return type(self).function(*given, reduction=self.reduction, **dict(self.options))

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(f"{name}={value!r}" for name, value in (("reduction", self.reduction), *self.options))


def order_arguments(function: Callable[..., Any], inputs: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """The first arguments of a function in its order, some of which are named.

    Raises:
        TypeError: it has no argument of that name, or one is missing.
    """
    if not named:
        return tuple(inputs)
    bound = inspect.signature(function).bind(*inputs, **named)
    return bound.args


def check_shapes(*inputs: Any) -> list[Tensor]:
    """The inputs of an elementwise loss, which have one shape.

    Raises:
        ShapeError: they differ.
    """
    given = [as_tensor(x) for x in inputs]
    if any(x.shape != given[0].shape for x in given):
        raise ShapeError(
            "the predictions and the targets have different shapes", location=user_location(),
            expected=str(given[0].type), received=", ".join(str(x.type) for x in given[1:]),
            suggestion="reshape one of them: broadcasting them would give another loss",
        )  # fmt: skip
    return given


class MSELoss(Loss):
    """The square of input - target.

    >>> MSELoss()([1.0, 3.0], [0.0, 0.0])
    Tensor(5., f32)
    """

    function = staticmethod(losses.mse_loss)


class L1Loss(Loss):
    """The magnitude of input - target."""

    function = staticmethod(losses.l1_loss)


class SmoothL1Loss(Loss):
    """Half the square of input - target over `beta` up to `beta`, beyond it linear with slope 1."""

    function = staticmethod(losses.smooth_l1_loss)

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        self.set_options(reduction, beta=beta)


class HuberLoss(Loss):
    """Half the square of input - target up to `delta`, beyond it linear with slope `delta` (Huber 1964)."""

    function = staticmethod(losses.huber_loss)

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        self.set_options(reduction, delta=delta)


class CrossEntropyLoss(Loss):
    """Minus the log probability of the class `target` [N, ...] under logits [N, C, ...].

    `weight` [C] scales classes; targets `ignore_index` do not count; `label_smoothing` moves that share of the
    probability evenly to all classes. Targets of floats are probabilities.

    >>> CrossEntropyLoss()([[0.0, 0.0]], Tensor([1]))
    Tensor(0.6931472, f32)
    """

    function = staticmethod(losses.cross_entropy)
    elementwise = False

    def __init__(
        self, weight: Any = None, reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0
    ) -> None:
        if not 0.0 <= label_smoothing <= 1.0:
            raise ArgumentError(f"label_smoothing is {label_smoothing}", location=user_location(), expected="0 to 1")
        self.set_options(reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
        self.weight = None if weight is None else as_tensor(weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of logits and classes."""
        return losses.cross_entropy(input, target, self.weight, reduction=self.reduction, **dict(self.options))


class NLLLoss(Loss):
    """Minus the element of log probabilities [N, C, ...] at the class `target` [N, ...]."""

    function = staticmethod(losses.nll_loss)
    elementwise = False

    def __init__(self, weight: Any = None, reduction: str = "mean", ignore_index: int = -100) -> None:
        self.set_options(reduction, ignore_index=ignore_index)
        self.weight = None if weight is None else as_tensor(weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of log probabilities and classes."""
        return losses.nll_loss(input, target, self.weight, reduction=self.reduction, **dict(self.options))


class BCELoss(Loss):
    """Minus the log probability of `target` (0 to 1) under probabilities; logarithms stop at -100.

    `weight` scales the losses of the elements; it broadcasts to them.
    """

    function: Callable[..., Any] = staticmethod(losses.binary_cross_entropy)

    def __init__(self, weight: Any = None, reduction: str = "mean") -> None:
        self.set_options(reduction)
        self.weight = None if weight is None else as_tensor(weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of predictions and targets of one shape."""
        x, y = check_shapes(input, target)
        return losses.binary_cross_entropy(x, y, self.weight, self.reduction)


class BCEWithLogitsLoss(Loss):
    """`BCELoss` of the sigmoid of logits, without loss of digits.

    `weight` scales the losses of the elements, `pos_weight` those of positive targets; both broadcast to the elements.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None) -> None:
        self.set_options(reduction)
        self.weight = None if weight is None else as_tensor(weight)
        self.pos_weight = None if pos_weight is None else as_tensor(pos_weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of logits and targets of one shape."""
        x, y = check_shapes(input, target)
        return losses.binary_cross_entropy_with_logits(x, y, self.weight, self.reduction, self.pos_weight)


class KLDivLoss(Loss):
    """The divergence of Kullback and Leibler (1951) of `target` from log probabilities.

    "mean" divides by the number of elements, "batchmean" by the size of the first axis.
    """

    function = staticmethod(losses.kl_div)
    reductions = (*LOSS_REDUCTIONS, "batchmean")

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        self.set_options(reduction, log_target=log_target)


class CosineEmbeddingLoss(Loss):
    """1 - cos(x1, x2) where `target` is 1, max(0, cos - margin) where it is -1."""

    function = staticmethod(metric_losses.cosine_embedding_loss)
    elementwise = False

    def __init__(self, margin: float = 0.0, reduction: str = "mean") -> None:
        self.set_options(reduction, margin=margin)


class TripletMarginLoss(Loss):
    """max(0, distance to the positive example - that to the negative one + margin).

    Distances are `p`-norms of the difference + `eps`. With `swap` the distance of the positive and the negative example
    counts where it is smaller than that of the anchor and the negative one.
    """

    function = staticmethod(metric_losses.triplet_margin_loss)

    def __init__(
        self, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6, swap: bool = False, reduction: str = "mean"
    ) -> None:
        self.set_options(reduction, margin=margin, p=p, eps=eps, swap=swap)


class TripletMarginWithDistanceLoss(Loss):
    """`TripletMarginLoss` with a distance of your own: a function of two batches of vectors."""

    function = staticmethod(metric_losses.triplet_margin_with_distance_loss)

    def __init__(
        self, *, distance_function: Callable[[Any, Any], Any] | None = None, margin: float = 1.0, swap: bool = False,
        reduction: str = "mean",
    ) -> None:  # fmt: skip
        self.set_options(reduction, distance_function=distance_function, margin=margin, swap=swap)


class MarginRankingLoss(Loss):
    """max(0, -target · (input1 - input2) + margin): `target` is 1 where the first should rank higher, else -1."""

    function = staticmethod(metric_losses.margin_ranking_loss)

    def __init__(self, margin: float = 0.0, reduction: str = "mean") -> None:
        self.set_options(reduction, margin=margin)


class HingeEmbeddingLoss(Loss):
    """The input where `target` is 1, and max(0, margin - input) where it is -1."""

    function = staticmethod(metric_losses.hinge_embedding_loss)

    def __init__(self, margin: float = 1.0, reduction: str = "mean") -> None:
        self.set_options(reduction, margin=margin)


class SoftMarginLoss(Loss):
    """log(1 + exp(-target · input)) for targets 1 and -1."""

    function = staticmethod(metric_losses.soft_margin_loss)


class MultiMarginLoss(Loss):
    """The mean over classes i ≠ y of max(0, margin - input[y] + input[i])^p, for [N, C] and classes y [N]."""

    function = staticmethod(metric_losses.multi_margin_loss)

    def __init__(self, p: int = 1, margin: float = 1.0, weight: Any = None, reduction: str = "mean") -> None:
        self.set_options(reduction, p=p, margin=margin)
        self.weight = None if weight is None else as_tensor(weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of scores and classes."""
        return metric_losses.multi_margin_loss(
            input, target, weight=self.weight, reduction=self.reduction, **dict(self.options)
        )


class MultiLabelMarginLoss(Loss):
    """The sum over classes y of `target` and classes i not among them of max(0, 1 - input[y] + input[i]) / C."""

    function = staticmethod(metric_losses.multilabel_margin_loss)


class MultiLabelSoftMarginLoss(Loss):
    """The mean over classes of the binary cross entropy of logits [N, C] with `target`, scaled by `weight`."""

    def __init__(self, weight: Any = None, reduction: str = "mean") -> None:
        self.set_options(reduction)
        self.weight = None if weight is None else as_tensor(weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of logits and targets of one shape."""
        x, y = check_shapes(input, target)
        return metric_losses.multilabel_soft_margin_loss(x, y, self.weight, self.reduction)


class PoissonNLLLoss(Loss):
    """The negative log likelihood of counts under a Poisson distribution with the mean exp(input).

    Without `log_input` the mean is the input; `full` adds Stirling's approximation of log(target!).
    """

    function = staticmethod(metric_losses.poisson_nll_loss)

    def __init__(self, log_input: bool = True, full: bool = False, eps: float = 1e-8, reduction: str = "mean") -> None:
        self.set_options(reduction, log_input=log_input, full=full, eps=eps)


class GaussianNLLLoss(Loss):
    """The negative log likelihood of targets under normal distributions: `loss(mean, target, variance)`."""

    function = staticmethod(metric_losses.gaussian_nll_loss)
    elementwise = False

    def __init__(self, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> None:
        self.set_options(reduction, full=full, eps=eps)


class CTCLoss(Loss):
    """Minus the log probability of label sequences, summed over their alignments with frames (Graves et al. 2006).

    `loss(log_probs, targets, input_lengths, target_lengths)` takes what `ts.ctc_loss` takes.
    """

    function = staticmethod(sequence_losses.ctc_loss)
    elementwise = False

    def __init__(self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False) -> None:
        self.set_options(reduction, blank=blank, zero_infinity=zero_infinity)


class CosineSimilarity(Module):
    """The cosine of the angle between the vectors along axis `dim`.

    >>> CosineSimilarity()([[1.0, 0.0]], [[3.0, 4.0]])
    Tensor([0.6], f32)
    """

    def __init__(self, dim: int = 1, eps: float = 1e-8) -> None:
        self.dim, self.eps = dim, eps

    def forward(self, x1: Any, x2: Any) -> Tensor:
        """The cosines."""
        return metric_losses.cosine_similarity(x1, x2, self.dim, self.eps)


class PairwiseDistance(Module):
    """The `p`-norm of x1 - x2 + `eps` along the last axis.

    >>> PairwiseDistance(eps=0.0)([[4.0, 5.0]], [[1.0, 1.0]])
    Tensor([5.], f32)
    """

    def __init__(self, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> None:
        self.p, self.eps, self.keepdim = p, eps, keepdim

    def forward(self, x1: Any, x2: Any) -> Tensor:
        """The distances."""
        return metric_losses.pairwise_distance(x1, x2, self.p, self.eps, self.keepdim)
