"""Passes on a tile function before it is emitted."""
