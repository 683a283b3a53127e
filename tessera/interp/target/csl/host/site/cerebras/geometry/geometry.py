"""Geometry module of the vendor's API: coordinates and rectangles on the fabric."""

from tessera.interp.target.csl.host.sdk_layout import IntRectangle, IntVector

__all__ = ["IntRectangle", "IntVector"]
