"""Passes over tile functions before LLVM IR is emitted."""
