"""Conformance cases: tile level, random."""
