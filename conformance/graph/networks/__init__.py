"""Conformance cases: graph level, functions of neural networks."""
