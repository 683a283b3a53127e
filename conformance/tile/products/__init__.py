"""Conformance cases: tile level, products."""
