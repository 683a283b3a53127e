"""Passes of the Graph and Schedule levels: each is a function that returns a new program."""
