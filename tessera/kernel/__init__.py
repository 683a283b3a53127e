"""@kernel: a Python function over tiles, read as source, becomes a Tile module."""

from tessera.kernel.decorators import autotune, kernel
from tessera.kernel.kernel import Kernel
from tessera.kernel.signature import constexpr
from tessera.tensor import Tensor as Tile

__all__ = ["Kernel", "Tile", "autotune", "constexpr", "kernel"]
