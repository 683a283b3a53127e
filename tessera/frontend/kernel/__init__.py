"""Kernel front end: @kernel reads the source of a Python function over tiles and makes a Tile module."""

from tessera.frontend.kernel.kernel_function import Kernel, autotune, kernel
from tessera.frontend.kernel.signature import constexpr
from tessera.ir.tensor import Tensor as Tile

# Other names of `Tile` in annotations of kernels: the compiler treats them alike.
KTile = Tile3D = Tile

__all__ = ["KTile", "Kernel", "Tile", "Tile3D", "autotune", "constexpr", "kernel"]
