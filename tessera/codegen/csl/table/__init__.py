"""Emission table: the CSL of each op."""
