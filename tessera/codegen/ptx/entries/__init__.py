"""Entries whose threads have different work: who fetches, who multiplies, and in what order programs go."""
