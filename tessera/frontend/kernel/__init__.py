"""Kernel front end: @kernel reads the source of a Python function over tiles and makes a Tile module."""

from tessera.frontend.kernel.kernel_function import Kernel, autotune, kernel
from tessera.frontend.kernel.signature import constexpr
from tessera.ir.tensor import Tensor as Tile

__all__ = ["Kernel", "Tile", "autotune", "constexpr", "kernel"]
