"""Lowerings: Graph to Schedule to Tile, or Graph to a mesh; each is one function from module to module."""
