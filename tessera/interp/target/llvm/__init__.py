"""LLVM emulator: runs LLVM IR text on NumPy, all lanes in lockstep."""

from tessera.interp.target.llvm.lanes import PerLane
from tessera.interp.target.llvm.machine import LlvmModule

__all__ = ["PerLane", "LlvmModule"]
