"""The kernel front end: @kernel reads a Python function over tiles as source and makes a Tile module of it."""

from tessera.frontend.kernel.kernel_function import Kernel, autotune, kernel
from tessera.frontend.kernel.signature import constexpr
from tessera.ir.tensor import Tensor as Tile

__all__ = ["Kernel", "Tile", "autotune", "constexpr", "kernel"]
