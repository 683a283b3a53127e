"""Lowering from Graph to Schedule: fusion and tiling of tensor ops into loop nests."""
