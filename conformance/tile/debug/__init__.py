"""Conformance cases: tile level, debug mode."""
