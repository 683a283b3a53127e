"""Conformance cases: graph level, composites."""
