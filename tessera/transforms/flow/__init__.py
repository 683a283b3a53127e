"""Structured control flow over tensors: loops and branches as ops with regions, with derivative and batching rules."""

from tessera.transforms.flow import control_flow_rules, launch_batching, launch_derivatives, loop_adjoints
from tessera.transforms.flow.associative_scan import associative_scan
from tessera.transforms.flow.control_flow import cond, fold, fori_loop, map_, scan, while_loop
from tessera.transforms.flow.implicit_differentiation import diff_through_opt, implicit_diff, optimize
from tessera.transforms.flow.microbatching import accumulate_grad, gradient_accumulation, per_example_grad

assert all((control_flow_rules, launch_batching, launch_derivatives, loop_adjoints))  # their rules fill the tables


__all__ = [
    "accumulate_grad",
    "associative_scan",
    "cond",
    "diff_through_opt",
    "fold",
    "fori_loop",
    "gradient_accumulation",
    "implicit_diff",
    "map_",
    "optimize",
    "per_example_grad",
    "scan",
    "while_loop",
]
