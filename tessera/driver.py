"""The whole pipeline: a traced function or a kernel, lowered level by level and run on a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tessera.codegen.registry import able, backend
from tessera.device import INTERP, generator_of
from tessera.errors import ArgumentError
from tessera.interp import graph as graph_interpreter
from tessera.interp import schedule as schedule_interpreter
from tessera.interp import tile as tile_interpreter
from tessera.ir.core import Function, Module
from tessera.lower.pipeline import steps
from tessera.lower.plan import Plan

LEVELS = ("graph", "schedule", "tile", "target")

# run(arrays) gives the outputs.
Run = Callable[[Sequence[Any]], list[np.ndarray]]


def plan_for(target: str) -> Plan:
    """The tile sizes a target asks for; the interpreter has no wishes of its own."""
    return Plan() if target == INTERP else backend(target).capabilities.plan or Plan()


def lower(function: Function, target: str = INTERP) -> dict[str, Module]:
    """The module of each level above Target, for a Graph function of concrete shapes: as traced, then as lowered."""
    traced, *lowered = lowering(function, plan_for(target))
    levels = {module.level: module for _, module in lowered}
    return {**levels, "graph": traced[1]}


def lowering(function: Function, plan: Plan) -> Iterator[tuple[str, Module]]:
    """The module after each pass, by the pass's name; the first is what was traced."""
    module = Module("graph", (function,))
    yield "trace", module
    for name, step in steps(plan):
        module = step(module)
        yield name, module


def run_level(levels: dict[str, Module], level: str, arrays: Sequence[Any], target: str = "llvm") -> list[np.ndarray]:
    """Run a program at one level, each by its interpreter."""
    if level not in RUN:
        raise ArgumentError(f'"{level}" is not a level', expected=", ".join(LEVELS))
    return RUN[level](levels, arrays, target)


def _run_target(levels: dict[str, Module], arrays: Sequence[Any], target: str) -> list[np.ndarray]:
    generator = able(target, "interpreter")
    return generator.interpreter(generator.emit(levels["tile"], {}))(arrays)


RUN: dict[str, Callable[[dict[str, Module], Sequence[Any], str], list[np.ndarray]]] = {
    "graph": lambda levels, arrays, _: graph_interpreter.run(levels["graph"].main, arrays),
    "schedule": lambda levels, arrays, _: schedule_interpreter.run(levels["schedule"], arrays),
    "tile": lambda levels, arrays, _: tile_interpreter.run(levels["tile"], arrays),
    "target": _run_target,
}


def executable(function: Function, device: str) -> Run:
    """What runs a Graph function on a device: the Graph interpreter, or a generator's runtime."""
    target = generator_of(device)
    if target == INTERP:
        return lambda arrays: graph_interpreter.run(function, arrays)
    return program(lower(function, target)["tile"], target)


def program(module: Module, target: str) -> Run:
    """What runs a Tile module on a target."""
    if target == INTERP:
        return lambda arrays: tile_interpreter.run(module, arrays)
    generator = able(target, "runtime")
    return generator.runtime(generator.emit(module, {})).run
