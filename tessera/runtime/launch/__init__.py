"""Launches: compiled kernels on arrays, streams and events, and autotuning."""
