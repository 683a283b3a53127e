"""Losses as modules, with PyTorch's names and defaults; the functions are those of `ts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.ir.tensor import Tensor, as_tensor
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

    def __init__(self, reduction: str = "mean", **options: Any) -> None:
        if reduction not in self.reductions:
            raise ArgumentError(
                f"unknown reduction {reduction!r}", location=user_location(), expected=", ".join(self.reductions)
            )
        self.reduction, self.options = reduction, tuple(options.items())

    def forward(self, *inputs: Any) -> Tensor:
        """The loss of the predictions and the targets."""
        given = [as_tensor(x) for x in inputs]
        if self.elementwise and any(x.shape != given[0].shape for x in given):
            raise ShapeError(
                "the predictions and the targets have different shapes", location=user_location(),
                expected=str(given[0].type), received=", ".join(str(x.type) for x in given[1:]),
                suggestion="reshape one of them: broadcasting them would give another loss",
            )  # fmt: skip
        return type(self).function(*given, reduction=self.reduction, **dict(self.options))

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(f"{name}={value!r}" for name, value in (("reduction", self.reduction), *self.options))


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
        super().__init__(reduction, beta=beta)


class HuberLoss(Loss):
    """Half the square of input - target up to `delta`, beyond it linear with slope `delta` (Huber 1964)."""

    function = staticmethod(losses.huber_loss)

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction, delta=delta)


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
        super().__init__(reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
        self.weight = None if weight is None else as_tensor(weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of logits and classes."""
        return losses.cross_entropy(input, target, self.weight, reduction=self.reduction, **dict(self.options))


class NLLLoss(Loss):
    """Minus the element of log probabilities [N, C, ...] at the class `target` [N, ...]."""

    function = staticmethod(losses.nll_loss)
    elementwise = False

    def __init__(self, weight: Any = None, reduction: str = "mean", ignore_index: int = -100) -> None:
        super().__init__(reduction, ignore_index=ignore_index)
        self.weight = None if weight is None else as_tensor(weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of log probabilities and classes."""
        return losses.nll_loss(input, target, self.weight, reduction=self.reduction, **dict(self.options))


class BCELoss(Loss):
    """Minus the log probability of `target` (0 to 1) under probabilities; logarithms stop at -100."""

    function = staticmethod(losses.binary_cross_entropy)


class BCEWithLogitsLoss(Loss):
    """`BCELoss` of the sigmoid of logits, without loss of digits.

    `pos_weight` scales the losses of positive targets.
    """

    function = staticmethod(losses.binary_cross_entropy_with_logits)

    def __init__(self, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self.pos_weight = None if pos_weight is None else as_tensor(pos_weight)

    def forward(self, input: Any, target: Any) -> Tensor:
        """The loss of logits and targets of one shape."""
        if as_tensor(input).shape != as_tensor(target).shape:
            return super().forward(input, target)  # raises
        return losses.binary_cross_entropy_with_logits(
            input, target, reduction=self.reduction, pos_weight=self.pos_weight
        )


class KLDivLoss(Loss):
    """The divergence of Kullback and Leibler (1951) of `target` from log probabilities.

    "mean" divides by the number of elements, "batchmean" by the size of the first axis.
    """

    function = staticmethod(losses.kl_div)
    reductions = (*LOSS_REDUCTIONS, "batchmean")

    def __init__(self, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(reduction, log_target=log_target)


class CosineEmbeddingLoss(Loss):
    """1 - cos(x1, x2) where `target` is 1, max(0, cos - margin) where it is -1."""

    function = staticmethod(metric_losses.cosine_embedding_loss)
    elementwise = False

    def __init__(self, margin: float = 0.0, reduction: str = "mean") -> None:
        super().__init__(reduction, margin=margin)


class TripletMarginLoss(Loss):
    """max(0, distance to the positive example - that to the negative one + margin)."""

    function = staticmethod(metric_losses.triplet_margin_loss)

    def __init__(self, margin: float = 1.0, p: float = 2.0, reduction: str = "mean") -> None:
        super().__init__(reduction, margin=margin, p=p)
