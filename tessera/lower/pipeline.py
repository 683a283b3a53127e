"""The steps from a traced Graph module to a Tile module, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tessera.evaluate import expand
from tessera.ir.core import Function, Module
from tessera.lower import attention, hosted, launches, scatter
from tessera.lower.mesh import Mesh, to_mesh
from tessera.lower.mesh.rules import rules as mesh_rules
from tessera.lower.plan import Plan
from tessera.lower.to_schedule import to_schedule
from tessera.lower.to_tile import to_tile
from tessera.op import Op
from tessera.passes import PIPELINE
from tessera.passes.common import share
from tessera.passes.dead_code import sweep
from tessera.passes.memory_plan import memory_plan
from tessera.passes.stochastic import stochastic

assert attention and scatter  # fill the table of launches

Step = Callable[[Module], Module]


def steps(plan: Plan) -> Iterator[tuple[str, Step]]:
    """Each step with its name."""
    yield "expand", _on_main(lambda f: primitives(f, plan))
    if plan.mesh is not None:
        yield from _mesh_steps(Mesh(*plan.mesh, plan.mesh_product))
        return
    yield "stochastic rounding", _on_main(stochastic)
    for name, rewrite in PIPELINE:
        yield name, _on_main(rewrite)
    yield "schedule", lambda module: to_schedule(module.main, plan)
    yield "memory plan", memory_plan
    yield "tile", to_tile


def _mesh_steps(mesh: Mesh) -> Iterator[tuple[str, Step]]:
    """The steps to a mesh of elements: no loop nests, so none of the rewrites that suit those."""
    yield "common subexpressions", _on_main(share)
    yield "dead code", _on_main(sweep)
    yield "mesh", lambda module: to_mesh(module, mesh)


def lower(module: Module, plan: Plan | None = None) -> Iterator[tuple[str, Module]]:
    """The module after each step."""
    for name, step in steps(plan or Plan()):
        module = step(module)
        yield name, module


def primitives(function: Function, plan: Plan) -> Function:
    """A function in which composites are replaced by their lowering, but for those that are launched."""
    if plan.mesh is not None:
        return expand(function, keep=mesh_rules.__contains__)
    kept = launches.kept(plan)
    return expand(
        function, keep=lambda op: (op in kept and _launched(function, op, plan)) or hosted.keeps(function, op, plan)
    )


def _launched(function: Function, op: Op, plan: Plan) -> bool:
    return all(launches.launch_of(n, plan) is not None for n in function.body.walk() if n.op is op)


def _on_main(rewrite: Callable[[Function], Function]) -> Step:
    return lambda module: module.replace(rewrite(module.main))
