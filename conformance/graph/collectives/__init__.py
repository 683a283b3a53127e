"""Conformance cases: graph level, collectives."""
