"""Conformance cases: tile.spec."""
