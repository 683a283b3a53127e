"""Conformance cases: graph level, gradients."""
