"""Sanitizer: debug mode of the Tile interpreter, with bounds checks, race detection, uninitialised reads and lints."""
