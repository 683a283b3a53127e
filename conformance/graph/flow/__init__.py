"""Conformance cases: graph level, flow."""
