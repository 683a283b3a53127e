"""Reasons: why an op has no error rule, or no conformance case."""

import tessera.ops  # noqa: F401
from tessera.ir.rules import REGISTRY
from tessera.lower.graph_to_schedule import host_ops, lowering
from tessera.transforms.flow import control_flow_rules, implicit_differentiation, region_ops

assert lowering and host_ops and region_ops and implicit_differentiation and control_flow_rules  # register their ops
COLLECTIVES = [
    f"ts.{name}"
    for name in (
        "all_reduce reduce_scatter reduce_to broadcast_from all_gather scatter_from gather_to all_to_all "
        "collective_permute local_part place_part send receive"
    ).split()
]
# The reason why an op has neither an error rule nor a lowering.
NO_ERROR_RULE = {
    **dict.fromkeys(("ts.for", "ts.while", "ts.if"), "bound mode evaluates the region"),
    **dict.fromkeys(("ts.scan", "ts.cond", "ts.while_loop", "ts.launch"), "bound mode evaluates the region"),
    **dict.fromkeys(
        [f"ts.{name}" for name in "cholesky svd qr eigh eig eig_parts solve slogdet".split()],
        "LAPACK runs on the host at every level; bound mode refuses it by name",
    ),
    **dict.fromkeys(COLLECTIVES, "the bounds of other ranks are not exchanged; bound mode refuses it by name"),
}
# The reason why no conformance case has the op.
NO_CASE = {
    **dict.fromkeys([op for op in NO_ERROR_RULE if "LAPACK" in NO_ERROR_RULE[op]], "it has no error bound"),
    **dict.fromkeys([op for op in REGISTRY if op.startswith("transform.")], "traced by transforms: tests/transforms"),
    **dict.fromkeys([op for op in REGISTRY if op.startswith("mesh.")], "made by the mesh lowering: tests/lower/mesh"),
    **dict.fromkeys(("tile.line", "tile.pause"), "made by the debugger: tests/tools/debug"),
    **dict.fromkeys(
        [f"ts.{name}" for name in "reduce_to place_part send receive".split()],
        "made by derivatives and by cutting arguments, or messages between two ranks: tests/dist",
    ),
    "ts.strided_view": "made of slices by the lowering: tests/lower/test_lower_levels.py",
    "ts.fusion_barrier": "made by ts.fusion: tests/compiler/test_fusion.py",
    "ts.kept": "marks a value for ts.checkpoint: tests/transforms/autodiff/test_checkpoint.py",
    **dict.fromkeys(("host.start", "host.wait"), "made of collectives: tests/lower/passes/test_collective_scheduling"),
    "tile.grid_size": "made by the lowering of stochastic rounding for grids of rank 2: tests/lower/passes",
    "tile.group_size": "a constant in every specialised kernel",
}
