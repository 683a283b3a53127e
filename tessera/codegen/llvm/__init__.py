"""Code generator for processors: Tile modules to LLVM IR."""

from tessera.codegen.llvm.generator import LlvmBackend

BACKEND = LlvmBackend()
