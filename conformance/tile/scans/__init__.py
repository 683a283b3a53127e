"""Conformance cases: tile level, scans."""
