"""Part of the simulator's replacement for the vendor's host package."""
