"""Analyses of the CSL generator on Tile functions."""
