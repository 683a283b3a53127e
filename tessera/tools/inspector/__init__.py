"""Lowering inspector: a program at every level, after every pass and over time, as one self-contained page."""

from tessera.tools.inspector.page import InspectorPage, make_page

__all__ = ["InspectorPage", "make_page"]
