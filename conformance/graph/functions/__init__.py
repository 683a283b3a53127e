"""Conformance cases: graph level, functions."""
