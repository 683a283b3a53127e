"""Places and rectangles on the fabric."""

from tessera.interp.target.csl.host.geometry import IntRectangle, IntVector

__all__ = ["IntRectangle", "IntVector"]
