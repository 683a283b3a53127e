"""Symbolic dimensions and the shape algebra over them."""

from tessera.shapes.dim import Dim, Size, as_size, bind, evaluate_shape, symbols
from tessera.shapes.rules import broadcast, normalize_axes, normalize_axis

__all__ = [
    "Dim",
    "Size",
    "as_size",
    "bind",
    "broadcast",
    "evaluate_shape",
    "normalize_axes",
    "normalize_axis",
    "symbols",
]
