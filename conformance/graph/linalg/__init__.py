"""Conformance cases: graph level, linalg."""
