"""Lowering from Schedule to Tile: loop nests become SPMD tile functions."""
