"""Losses whose options have another order in PyFlame than in PyTorch: `reduction` comes first."""

from __future__ import annotations

from typing import Any

from tessera import nn as core
from tessera.pyflame.nn.modules import make_layer
from tessera.pyflame.tensor import Tensor, elements_of


def _as_core(weight: Any) -> Any:
    return elements_of(weight) if isinstance(weight, Tensor) else weight


class CrossEntropyLoss(make_layer(core.CrossEntropyLoss)):  # type: ignore[misc]
    """The negative log probability of the target class [N] under logits [N, classes].

    >>> import tessera.pyflame as pf
    >>> loss = CrossEntropyLoss("sum")(pf.zeros([2, 4]), pf.tensor([0, 3], dtype=pf.int32))
    >>> round(loss.item(), 4)
    2.7726
    """

    def __init__(
        self, reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0, weight: Any = None
    ) -> None:
        super().__init__(_as_core(weight), reduction, ignore_index, label_smoothing)


class NLLLoss(make_layer(core.NLLLoss)):  # type: ignore[misc]
    """The negative log probability of the target class [N], from log probabilities [N, classes]."""

    def __init__(self, reduction: str = "mean", ignore_index: int = -100, weight: Any = None) -> None:
        super().__init__(_as_core(weight), reduction, ignore_index)


class BCELoss(make_layer(core.BCELoss)):  # type: ignore[misc]
    """Minus the log probability of targets (0 to 1) under probabilities."""

    def __init__(self, reduction: str = "mean", weight: Any = None) -> None:
        super().__init__(_as_core(weight), reduction)


class BCEWithLogitsLoss(make_layer(core.BCEWithLogitsLoss)):  # type: ignore[misc]
    """`BCELoss` of the sigmoid of logits, without loss of digits."""

    def __init__(self, reduction: str = "mean", pos_weight: Any = None, weight: Any = None) -> None:
        super().__init__(_as_core(weight), reduction, _as_core(pos_weight))
