"""An interpreter of LLVM IR text on NumPy: parses on its own, runs all lanes side by side."""

from tessera.interp.target.llvm.lanes import Lanes
from tessera.interp.target.llvm.module import Module

__all__ = ["Lanes", "Module"]
