"""Semantic analysis of CSL: names, types, comptime evaluation, and Python code for what runs on a PE."""
