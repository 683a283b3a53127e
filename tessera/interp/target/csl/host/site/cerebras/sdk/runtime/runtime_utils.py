"""Helpers for the arrays of copies, and port maps, under their names in the SDKs before 1.0."""

from tessera.interp.target.csl.host.port_maps import (
    convert_input_tensor,
    format_output_tensor,
    prepare_output_tensor,
)
from tessera.interp.target.csl.host.runtime import calculate_cycles, input_array_to_u32, memcpy_view

__all__ = [
    "calculate_cycles",
    "convert_input_tensor",
    "format_output_tensor",
    "input_array_to_u32",
    "memcpy_view",
    "prepare_output_tensor",
]
