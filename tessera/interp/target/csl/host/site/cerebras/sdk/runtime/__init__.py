"""Part of the simulator's stand-in for the vendor's host package."""
