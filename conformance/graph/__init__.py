"""Conformance cases: graph."""
