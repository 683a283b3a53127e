"""Conformance cases: tile level, errors."""
