"""Autotuning: measures the configurations of a kernel and remembers the best."""
