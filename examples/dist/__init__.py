"""A small GPT trained in every way that tessera.dist has: `python -m examples.dist.gpt`."""
