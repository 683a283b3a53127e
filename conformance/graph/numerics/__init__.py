"""Conformance cases: graph level, numerics."""
