"""Symbolic dimensions and the shape algebra over them."""

from tessera.shapes.binding import bind, bind_all
from tessera.shapes.constraints import dims, require
from tessera.shapes.dim import Dim, Size, UnknownSizeError, evaluate_shape, symbols
from tessera.shapes.reading import as_size
from tessera.shapes.rules import broadcast, normalize_axes, normalize_axis

__all__ = [
    "Dim",
    "Size",
    "UnknownSizeError",
    "as_size",
    "bind",
    "bind_all",
    "broadcast",
    "dims",
    "evaluate_shape",
    "normalize_axes",
    "normalize_axis",
    "require",
    "symbols",
]
