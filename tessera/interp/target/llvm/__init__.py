"""LLVM emulator: LLVM IR text on NumPy, all lanes side by side."""

from tessera.interp.target.llvm.lanes import PerLane
from tessera.interp.target.llvm.machine import LlvmModule

__all__ = ["PerLane", "LlvmModule"]
