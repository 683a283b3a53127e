"""Emulators of target text: each parses on its own and knows nothing of the generator."""
