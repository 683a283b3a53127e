"""Conformance cases: tile.language."""
