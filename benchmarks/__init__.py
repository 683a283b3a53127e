"""Benchmarks: each a ratio against a peer measured in the same run, kept as JSON in results/."""
