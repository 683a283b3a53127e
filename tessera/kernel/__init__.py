"""@kernel: a Python function over tiles, read as source, becomes a Tile module."""

from tessera.kernel import tile
from tessera.kernel.kernel import Kernel, kernel
from tessera.kernel.signature import constexpr
from tessera.tensor import Tensor as Tile

__all__ = ["Kernel", "Tile", "constexpr", "kernel", "tile"]
