"""The IR: one data structure for all four levels, its printer, parser, verifier and hash."""
