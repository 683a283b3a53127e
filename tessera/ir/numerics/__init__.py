"""Numerics: conversions between element types, and rigorous error bounds."""
