"""Tessera: a tile-centric programming model for deep learning whose every level runs."""
