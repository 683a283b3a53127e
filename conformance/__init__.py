"""The conformance suite: programs, inputs, what is expected, and what must be refused."""
