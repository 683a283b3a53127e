"""@kernel: a Python function over tiles, read as source, becomes a Tile module."""
