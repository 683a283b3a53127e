"""Runtime: compiles programs for a target, runs them, and builds and loads artifacts."""
