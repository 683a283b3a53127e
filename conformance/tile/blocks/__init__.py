"""Conformance cases: tile level, blocks."""
