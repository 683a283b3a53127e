"""Conformance cases: tile level, groups."""
