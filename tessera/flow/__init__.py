"""Loops and branches over tensors: traced as nodes with regions, differentiated, batched and lowered as such."""

from tessera.flow import batching, branch_derivative, scan_derivative
from tessera.flow.accumulate import accumulate_grad, gradient_accumulation, per_example_grad
from tessera.flow.branches import cond, while_loop
from tessera.flow.implicit import implicit_diff
from tessera.flow.loops import fold, fori_loop, map_, scan
from tessera.flow.optimize import diff_through_opt, optimize

assert all((batching, branch_derivative, scan_derivative))  # they fill tables

__all__ = [
    "accumulate_grad",
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
