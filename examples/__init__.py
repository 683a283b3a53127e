"""Examples, each a short file with an entry point, inputs and a reference."""
