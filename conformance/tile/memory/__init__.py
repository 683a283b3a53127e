"""Conformance cases: tile level, memory."""
