"""Emission rows of ops on blocks: memory, products, reductions, collectives, control flow."""
