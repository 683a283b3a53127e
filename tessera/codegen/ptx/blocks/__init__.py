"""Emission rows of the ops on blocks: memory, products, reductions, what threads tell each other."""
