"""Fuzzing: random programs whose results must agree on every level and target within their error bounds."""
