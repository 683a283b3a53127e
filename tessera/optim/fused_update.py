"""Fused updates: one rule applied to many parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tessera.core.types import DType
from tessera.ir.tensor import Tensor

Rule = Callable[[Sequence[Tensor], Mapping[str, Any]], list[Tensor]]


def update_together(
    rule: Rule, tasks: Sequence[Sequence[Tensor]], shared: Mapping[str, Any], types: Sequence[tuple[DType, bool]]
) -> list[list[Tensor]]:
    """The results of a rule for each parameter with its gradient and slots."""
    return [rule(task, shared) for task in tasks]
