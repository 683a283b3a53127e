"""The IR: one data structure for all four levels, with its op definitions, printer, parser, verifier, evaluator and
numerics."""
