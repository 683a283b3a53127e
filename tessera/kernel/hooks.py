"""Launch hooks: functions called before and after each launch of a kernel, on every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Started:
    """A launch: the kernel's name, grid, group and target, its constants, and its arrays by parameter."""

    kernel: str
    grid: tuple[int, ...]
    group: int
    target: str
    constants: Mapping[str, Any]
    arrays: Mapping[str, Any]


Hook = Callable[[Started], Any]


@dataclass(frozen=True)
class Hooks:
    """The hooks of a kernel, in the order in which they were added."""

    before: list[Hook] = field(default_factory=list)
    after: list[Hook] = field(default_factory=list)
