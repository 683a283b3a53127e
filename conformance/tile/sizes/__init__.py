"""Conformance cases: tile level, sizes."""
