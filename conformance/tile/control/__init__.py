"""Conformance cases: tile level, control."""
