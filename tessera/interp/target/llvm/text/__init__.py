"""LLVM IR text: types, syntax tree, lexer and parser."""
