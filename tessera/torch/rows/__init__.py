"""Rows: the functions of Tessera values that ATen ops mean, by subject (the op schemas of PyTorch)."""
