"""LLVM IR as text: types, instruction builder, memory accesses, functions and modules."""
