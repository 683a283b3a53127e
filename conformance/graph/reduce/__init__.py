"""Conformance cases: graph level, reduce."""
