"""Conformance cases: tile."""
