"""Emission rows of scalars: arithmetic, conversions, packing, mathematical functions."""
