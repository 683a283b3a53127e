"""Semantic analysis of CSL: names, types, comptime evaluation, and generation of Python code for the run-time part."""
