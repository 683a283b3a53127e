"""Lowering pipeline: the named steps from a traced Graph module to a Tile module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tessera.ir.composites import expand_composites as expand_composites_
from tessera.ir.core import Function, Module
from tessera.ir.rewrite import eliminate_common_subexpressions, eliminate_dead_code
from tessera.ir.rules import Op
from tessera.lower import lowering_plan
from tessera.lower.graph_to_schedule import host_ops
from tessera.lower.graph_to_schedule.lowering import to_schedule
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.mesh import Mesh, to_mesh
from tessera.lower.mesh.op_rules import mesh_op_rules as mesh_rules
from tessera.lower.passes import PIPELINE
from tessera.lower.passes.memory_planning import plan_memory
from tessera.lower.passes.stochastic_rounding import expand_stochastic_rounding
from tessera.lower.schedule_to_tile.lowering import to_tile

PipelineStep = Callable[[Module], Module]


def list_steps(plan: LoweringPlan) -> Iterator[tuple[str, PipelineStep]]:
    """Each step with its name."""
    yield "expand", _apply_to_main(lambda f: expand_composites(f, plan))
    if plan.mesh is not None:
        yield from _list_mesh_steps(Mesh(*plan.mesh, plan.mesh_product))
        return
    yield "stochastic rounding", _apply_to_main(expand_stochastic_rounding)
    for name, rewrite in PIPELINE:
        yield name, _apply_to_main(rewrite)
    yield "schedule", lambda module: to_schedule(module.main, plan)
    yield "memory plan", plan_memory
    yield "tile", to_tile


def _list_mesh_steps(mesh: Mesh) -> Iterator[tuple[str, PipelineStep]]:
    """The steps to a mesh of elements: no loop nests, so none of the rewrites that suit those."""
    yield "common subexpressions", _apply_to_main(eliminate_common_subexpressions)
    yield "dead code", _apply_to_main(eliminate_dead_code)
    yield "mesh", lambda module: to_mesh(module, mesh)


def lower(module: Module, plan: LoweringPlan | None = None) -> Iterator[tuple[str, Module]]:
    """The module after each step."""
    for name, step in list_steps(plan or LoweringPlan()):
        module = step(module)
        yield name, module


def expand_composites(function: Function, plan: LoweringPlan) -> Function:
    """A function in which composites are replaced by their lowering, but for those that are launched."""
    if plan.mesh is not None:
        return expand_composites_(function, keep=mesh_rules.__contains__)
    kept = lowering_plan.find_library_ops(plan)
    return expand_composites_(
        function,
        keep=lambda op: (
            (op in kept and _has_library_launch(function, op, plan)) or host_ops.runs_on_host(function, op, plan)
        ),
    )


def _has_library_launch(function: Function, op: Op, plan: LoweringPlan) -> bool:
    return all(lowering_plan.find_library_launch(n, plan) is not None for n in function.body.walk() if n.op is op)


def _apply_to_main(rewrite: Callable[[Function], Function]) -> PipelineStep:
    return lambda module: module.replace(rewrite(module.main))
