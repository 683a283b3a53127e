"""Tile programs for processors, through LLVM."""

from tessera.codegen.llvm.generator import LLVM

BACKEND = LLVM()
