"""Emission tables: the rows of each op as LLVM IR."""
