"""The contract between the compiler and a code generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.ir.core import Module
from tessera.types import DType


@dataclass(frozen=True)
class Capabilities:
    """What a target can do: the passes above it choose tiles by this.

    `shared_bytes` is the shared memory of a group and `block_bytes` the room for one tile's blocks; None: no limit.
    `meeting` is the number of groups that run at once and so may wait for each other at a grid barrier; 0: none.
    `plan` holds the target's wishes for tile sizes (a `tessera.lower.plan.Plan`), or None.
    """

    vector_bytes: int
    dtypes: tuple[DType, ...]
    max_grid_rank: int = 3
    max_group: int = 1024
    shared_bytes: int | None = None
    block_bytes: int | None = None
    meeting: int = 0
    plan: Any = None


class Runtime(Protocol):
    """An artifact made ready to run."""

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The outputs; arrays that the program writes in place are written."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A code generator, found through the entry point group `tessera.codegen`.

    `runtime` and `interpreter` are optional: what would need one says so (`registry.able`).
    """

    name: str

    @property
    def capabilities(self) -> Capabilities:
        """What this target can do."""
        ...

    def emit(self, module: Module, options: Mapping[str, Any]) -> Artifact:
        """The target text and launch plan of a Tile module.

        Raises:
            UnsupportedOpError: an op has neither a row nor a lowering; it names the op, the target and the line.
        """
        ...

    def runtime(self, artifact: Artifact) -> Runtime:
        """What runs the artifact on the device."""
        ...

    def interpreter(self, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """What runs the artifact's text without the device."""
        ...
