"""Conformance cases: graph level, symbolic sizes."""
