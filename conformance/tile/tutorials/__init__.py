"""Conformance cases: tile.tutorials."""
