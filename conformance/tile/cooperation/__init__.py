"""Conformance cases: tile level, cooperation."""
