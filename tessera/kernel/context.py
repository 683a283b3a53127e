"""The tile configuration that a kernel asks for: its block sizes by name, and the rows and columns of its block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.errors import UnknownNameError
from tessera.kernel.blocks import arange
from tessera.kernel.ids import program_id
from tessera.kernel.ranges import BlockIndex
from tessera.kernel.trace import current

_PLACES = {"m": 0, "n": 1, "k": 2, "d": 2}
_HINTS = {"vector": 1, "stages": 1, "prefetch": 0}


class Context:
    """Block sizes: .M .N .K (also .m .n .k, and .d for the third) from `tile_shape`.

    A constant of the kernel goes before that, and where `tile_shape` says nothing the dim of that name.
    """

    def __init__(self, tile_shape: tuple[int, ...], constants: Mapping[str, Any]) -> None:
        self.tile_shape = tile_shape
        self.constants = constants

    def __getattr__(self, name: str) -> Any:
        place = _PLACES.get(name.lower())
        if place is not None and place < len(self.tile_shape):
            return self.tile_shape[place]
        for known in (self.constants, _HINTS):
            if name in known:
                return known[name]
        raise UnknownNameError(
            f"the tile context has no `{name}`",
            expected="M, N, K (or m, n, d) and the kernel's constants",
            received=f"tile_shape={self.tile_shape}",
            suggestion="@kernel(tile_shape=(64, 64, 64))",
        )


def context() -> Context:
    """The tile configuration of this kernel."""
    trace = current("tile.context")
    return Context(trace.tile_shape, trace.constants)


def row_index() -> Any:
    """The rows of this program's block, by the last axis of the grid and the first block size."""
    trace = current("tile.row_index")
    size = context().m
    return arange(0, size) + program_id(len(trace.grid) - 1) * size  # type: ignore[operator]


def col_index(block: Any = 0) -> Any:
    """The columns of a block (a BlockIndex or a number), each of the second block size."""
    found = block if isinstance(block, BlockIndex) else BlockIndex(block, context().n)
    return arange(0, found.size) + found.start  # type: ignore[operator]
