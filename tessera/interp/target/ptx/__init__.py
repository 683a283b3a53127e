"""An interpreter of PTX text on NumPy: parses on its own, runs all threads side by side."""

from tessera.interp.target.ptx.module import Module
from tessera.interp.target.ptx.tensor_map import TensorMap

__all__ = ["Module", "TensorMap"]
