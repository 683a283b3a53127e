"""The conformance suite: programs with inputs that must agree with their error bounds, or be refused."""
