"""Functions of networks on lazy tensors: losses, and the functions of layers (PyFlame API reference, "Functional").

>>> import tessera.pyflame as pf
>>> mse_loss(pf.tensor([1.0, 2.0]), pf.tensor([0.0, 0.0])).item()
2.5
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tessera.nn import functional as core
from tessera.nn import losses
from tessera.pyflame.tensor import Tensor, record

# Losses: the functions of the modules, so that shapes are checked alike.


def _apply_loss(kind: Any, pred: Any, target: Any, reduction: str, **options: Any) -> Tensor:
    return record(kind.__name__, kind(reduction, **options).forward, pred, target)


def mse_loss(pred: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """The square of pred - target."""
    return _apply_loss(losses.MSELoss, pred, target, reduction)


def l1_loss(pred: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """The magnitude of pred - target."""
    return _apply_loss(losses.L1Loss, pred, target, reduction)


def smooth_l1_loss(pred: Tensor, target: Tensor, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """Half the square of pred - target over `beta` up to `beta`, beyond it linear."""
    return _apply_loss(losses.SmoothL1Loss, pred, target, reduction, beta=beta)


def cross_entropy(
    logits: Tensor, targets: Tensor, reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """The negative logarithm of the softmax of the logits [N, classes] at the target class [N], an integer."""
    kind = losses.CrossEntropyLoss(reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing)
    return record("CrossEntropyLoss", kind.forward, logits, targets)


def nll_loss(log_probs: Tensor, targets: Tensor, reduction: str = "mean", ignore_index: int = -100) -> Tensor:
    """The negative logarithmic probability of the target class."""
    return record("NLLLoss", losses.NLLLoss(reduction=reduction, ignore_index=ignore_index).forward, log_probs, targets)


def bce_loss(probs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Binary cross entropy of probabilities."""
    return record("BCELoss", losses.BCELoss(reduction=reduction).forward, probs, targets)


def bce_with_logits(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Binary cross entropy of logits, stable for large ones."""
    return record("BCEWithLogitsLoss", losses.BCEWithLogitsLoss(reduction=reduction).forward, logits, targets)


def kl_div(log_probs: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """The Kullback-Leibler divergence, element by element; "batchmean" divides the sum by the batch."""
    return record("KLDivLoss", losses.KLDivLoss(reduction=reduction, log_target=log_target).forward, log_probs, target)


binary_cross_entropy, binary_cross_entropy_with_logits = bce_loss, bce_with_logits


# Other functions: those of tessera.nn.functional with their names.


def _is_operand(value: Any) -> bool:
    return isinstance(value, Tensor)


def _make_lazy(name: str) -> Callable[..., Any]:
    function = getattr(core, name)

    @functools.wraps(getattr(function, "ref", function))
    def call(*args: Any, **named: Any) -> Any:
        keys = list(named)
        given = [*args, *(named[k] for k in keys)]
        operands = [x for x in given if _is_operand(x)]

        def apply(*found: Any) -> Any:
            rest = iter(found)
            filled = [next(rest) if _is_operand(x) else x for x in given]
            return function(*filled[: len(args)], **dict(zip(keys, filled[len(args) :], strict=True)))

        return record(name, apply, *operands)

    return call


_NAMES = [name for name in core.__all__ if name not in globals() and callable(getattr(core, name))]
globals().update({name: _make_lazy(name) for name in _NAMES})
