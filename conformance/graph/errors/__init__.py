"""Conformance cases: graph level, errors."""
