"""Cases of the standard library."""
