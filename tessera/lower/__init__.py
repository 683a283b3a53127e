"""The lowerings: Graph to Schedule to Tile, each one function from module to module."""
