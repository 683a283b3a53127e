"""Conformance cases: graph level, kernel launches."""
