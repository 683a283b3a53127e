"""Conformance cases: tile level, atomics."""
