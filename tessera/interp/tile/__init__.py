"""Tile interpreter: all program instances of a grid at once on NumPy arrays (SIMT execution by masking)."""
