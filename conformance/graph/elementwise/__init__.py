"""Conformance cases: graph level, elementwise."""
