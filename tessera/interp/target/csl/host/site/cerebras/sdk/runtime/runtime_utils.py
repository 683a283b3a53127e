"""Helpers for the arrays of copies, under their name in the SDKs before 1.0."""

from tessera.interp.target.csl.host.runtime import calculate_cycles, input_array_to_u32, memcpy_view

__all__ = ["calculate_cycles", "input_array_to_u32", "memcpy_view"]
