"""The memory that something lies in, as annotations say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tessera.errors import ArgumentError, here
from tessera.types import GLOBAL


@dataclass(frozen=True)
class Space:
    """A memory space in an annotation: `Tensor[128, f32] @ ts.memory("register")`."""

    name: str

    def __rmatmul__(self, type: Any) -> Placed:
        return Placed(type, self)


@dataclass(frozen=True)
class Placed:
    """A type and the space where its values lie."""

    type: Any
    space: Space


def unplaced(annotation: Any, name: str) -> Any:
    """The annotation of a kernel's parameter without its space, which is global.

    Raises:
        ArgumentError: it says another space.
    """
    if not isinstance(annotation, Placed):
        return annotation
    if annotation.space.name != GLOBAL:
        raise ArgumentError(
            f"the parameter `{name}` cannot lie in {annotation.space.name} memory", location=here(),
            expected="global", suggestion="allocate it in the kernel: tile.alloc_shared(...)",
        )  # fmt: skip
    return annotation.type
