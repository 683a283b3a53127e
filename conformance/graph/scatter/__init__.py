"""Conformance cases: graph level, shape."""
