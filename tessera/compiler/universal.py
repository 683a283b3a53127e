"""Compilation of one graph for several targets, and the base of code generators that are plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.contract import (
    Capabilities,
    CompilerPass,
    check_element_types,
    check_resources,
    emit_artifact,
    get_backend,
    get_capable_backend,
    load_interpreter,
    load_runtime,
    run_passes,
)
from tessera.compiler.graph_ir import GraphIR
from tessera.core.device import find_generator_name
from tessera.core.errors import ArgumentError, user_location
from tessera.core.types import DTYPES, DType
from tessera.frontend.jit.tracing import Jit, TracedFunction, to_array
from tessera.ir.core import Function, Module
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.pipeline import list_steps
from tessera.runtime import driver


class CodeGenerator:
    """The base of a code generator that is a plugin (docs/adding-a-backend.md): override `generate(tile_ir)`.

    `generate` gives the target text of a module of the Tile level: its functions after the first are the tile
    functions. `emit` checks element types and resources, runs the passes and makes the artifact. Set `name`, and
    `capabilities` where the defaults do not fit; add `runtime(artifact)` or `interpreter(artifact)` to run the text.
    """

    name = "plugin"
    extension = "txt"
    dtypes: tuple[DType, ...] = tuple(DTYPES)

    @property
    def capabilities(self) -> Capabilities:
        """The limits of the target."""
        return Capabilities(vector_bytes=16, dtypes=self.dtypes)

    def generate(self, tile_ir: Module) -> str:
        """The target text of a Tile module."""
        raise ArgumentError(
            f"{type(self).__name__} has no generate", location=user_location(), expected="def generate(self, tile_ir)"
        )

    def passes(self, module: Module, options: Mapping[str, Any]) -> Sequence[CompilerPass]:
        """The generator's own passes over a Tile module; none by default."""
        return ()

    def emit(self, module: Module, options: Mapping[str, Any] = MappingProxyType({})) -> Artifact:
        """The artifact of a Tile module: its text."""
        check_element_types(module, self.name, self.capabilities.dtypes)
        check_resources(module, self.name, self.capabilities)
        made = run_passes(self.passes(module, options), module)
        text = self.generate(made)
        if not isinstance(text, str):
            raise ArgumentError(
                f"{type(self).__name__}.generate gives no text", location=user_location(), expected="str",
                received=type(text).__name__,
            )  # fmt: skip
        manifest = {"target": self.name, "entry": module.main.name}
        return Artifact(manifest, {f"{module.main.name}.{self.extension}": text})


# Targets.

TYPES = {"cuda": "ptx", "cpu": "llvm", "wse": "csl"}  # what users call the built-in generators


@dataclass(frozen=True)
class Target:
    """A target of a compilation: the name of a generator ("llvm", "ptx", "csl:4x4") or of a device ("cpu", "cuda").

    Raises:
        UnknownNameError: there is no such generator.

    >>> Target("cuda").generator, Target("llvm").type
    ('ptx', 'cpu')
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ArgumentError(
                "a target is the name of a generator", location=user_location(), expected='"llvm", "ptx", "csl"',
                received=repr(self.name)[:80],
            )  # fmt: skip
        get_backend(self.generator)

    @property
    def generator(self) -> str:
        """The name of the code generator."""
        return TYPES.get(self.name) or find_generator_name(self.name)

    @property
    def type(self) -> str:
        """The kind of device: "cuda", "cpu", "wse", or the generator's own name."""
        plain = self.generator.partition(":")[0]
        return {v: k for k, v in TYPES.items()}.get(plain, plain)

    @property
    def plan(self) -> LoweringPlan:
        """The tile sizes that suit it."""
        return driver.find_plan(self.generator)


@dataclass(frozen=True)
class TargetProgram:
    """A program compiled for a target: its artifact and Tile module. A call runs it, in an emulator where need be."""

    target: Target
    artifact: Artifact
    tile_ir: Module

    def __call__(self, *arrays: Any) -> list[np.ndarray]:
        generator = get_backend(self.target.generator)
        given = [to_array(a) for a in arrays]
        if hasattr(generator, "runtime") and getattr(generator, "has_device", True):
            return load_runtime(generator, self.artifact).run(given)
        return load_interpreter(get_capable_backend(self.target.generator, "interpreter"), self.artifact)(given)

    def save(self, path: str | Path) -> Path:
        """Write the artifact folder."""
        return self.artifact.save(path)


class UniversalCompiler:
    """Compiles one graph for several targets, step by step; override a step to change it for a target.

    >>> from tessera import jit, ones
    >>> graph = as_graph(jit(lambda x: x + 1.0).trace(ones((4,))))
    >>> sorted(t.name for t in UniversalCompiler().compile(graph, ["llvm", "ptx"]))
    ['llvm', 'ptx']
    """

    def compile(self, graph: Any, targets: Sequence[Any]) -> dict[Any, TargetProgram]:
        """The program for each target, under the target as it was given; graphs are traces, GraphIRs or functions."""
        return {Target(t) if isinstance(t, str) else t: self.compile_for(graph, t) for t in targets}

    def compile_for(self, graph: Any, target: Target | str) -> TargetProgram:
        """The program for one target."""
        target = Target(target) if isinstance(target, str) else target
        optimized = self.optimize_for_target(graph, target)
        schedule = self.generate_schedule(optimized, target)
        return self.codegen(self.lower_to_tile(optimized, schedule, target), target)

    def optimize_for_target(self, graph: Any, target: Target) -> GraphIR:
        """The graph after the passes of the Graph level."""
        module = Module("graph", (as_graph(graph).function,))
        for _, step in _take_steps(module, target, "graph"):
            module = step(module)
        return GraphIR(module.main)

    def generate_schedule(self, graph: GraphIR, target: Target) -> Module:
        """The Schedule module of an optimised graph; for a mesh, whose programs skip that level, the graph."""
        module = Module("graph", (graph.function,))
        for _, step in _take_steps(module, target, "schedule"):
            module = step(module)
        return module

    def lower_to_tile(self, graph: GraphIR, schedule: Module, target: Target) -> Module:
        """The Tile module of a schedule."""
        module = schedule
        for _, step in _take_steps(module, target, "tile", graph.function):
            module = step(module)
        return module

    def lower_to_ptx(self, graph: GraphIR, schedule: Module) -> Module:
        """The Tile module for NVIDIA GPUs."""
        return self.lower_to_tile(graph, schedule, Target("ptx"))

    def lower_to_llvm(self, graph: GraphIR, schedule: Module) -> Module:
        """The Tile module for processors."""
        return self.lower_to_tile(graph, schedule, Target("llvm"))

    def codegen(self, tile_ir: Module, target: Target) -> TargetProgram:
        """The target's program of a Tile module."""
        return TargetProgram(target, emit_artifact(get_backend(target.generator), tile_ir, {}), tile_ir)


def _take_steps(module: Module, target: Target, level: str, function: Function | None = None) -> list[tuple[str, Any]]:
    """The steps of the pipeline that stay at a level or lead to it from the one above."""
    steps = list_steps(target.plan, function or module.main)
    names = [name for name, _ in steps]
    entry = {"schedule": "schedule", "tile": "tile"} if target.plan.mesh is None else {"tile": "mesh"}
    begin = {"graph": 0, "schedule": _place(names, entry.get("schedule")), "tile": _place(names, entry["tile"])}
    end = {"graph": begin["schedule"], "schedule": begin["tile"], "tile": len(names)}
    return steps[begin[level] : end[level]]


def _place(names: Sequence[str], name: str | None) -> int:
    return names.index(name) if name in names else names.index("mesh")


def as_graph(graph: Any) -> GraphIR:
    """A graph, or the graph of a trace (`ts.jit(f).trace(x)`) or function.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(graph, GraphIR):
        return graph
    if isinstance(graph, TracedFunction):
        return GraphIR(graph.function)
    if isinstance(graph, Function):
        return GraphIR(graph)
    raise ArgumentError(
        "this is no graph", location=user_location(), expected="ts.jit(f).trace(x), a GraphIR, or a Function",
        received=repr(graph)[:80], suggestion="trace it first" if isinstance(graph, Jit) else None,
    )  # fmt: skip


def define_compiler(kind: type) -> type:
    """A compiler of the user: what it does not define is that of UniversalCompiler.

    Raises:
        ArgumentError: it is no class with `compile(graph, targets)`.
    """
    if not isinstance(kind, type) or not callable(getattr(kind, "compile", None)):
        raise ArgumentError(
            "@ts.compiler decorates a class with compile(graph, targets)", location=user_location(),
            received=repr(kind)[:80],
        )  # fmt: skip
    return kind if issubclass(kind, UniversalCompiler) else type(kind.__name__, (kind, UniversalCompiler), {})
