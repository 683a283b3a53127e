"""Compiler driver: lowers a traced function or kernel through all levels and runs it on a target."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tessera.codegen.contract import (
    Runtime,
    emit_artifact,
    get_backend,
    get_capable_backend,
    load_interpreter,
    load_runtime,
)
from tessera.codegen.donation import reuse_donated
from tessera.codegen.grouped import ungroup_launches
from tessera.core.device import INTERP, find_generator_name
from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError
from tessera.core.progress import track
from tessera.interp import graph as graph_interpreter
from tessera.interp import schedule as schedule_interpreter
from tessera.interp.tile import interpreter as tile_interpreter
from tessera.ir.array_interchange import READERS, import_device_array
from tessera.ir.core import Function, Module
from tessera.lower.lowering_plan import GRAPH, PASSES, RUN_OBSERVER, LoweringPlan, find_extensions
from tessera.lower.pipeline import list_steps

LEVELS = ("graph", "schedule", "tile", "target")

# run(arrays) returns the outputs.
RunFunction = Callable[[Sequence[Any]], list[np.ndarray]]


def find_plan(target: str, choice: Mapping[str, Any] = MappingProxyType({})) -> LoweringPlan:
    """Return the tile sizes that a target prefers, with the fields of a choice; the interpreter has no preference."""
    found = None if target == INTERP else get_backend(target).capabilities.plan
    plan = (found() if callable(found) else found) or LoweringPlan()
    return replace(plan, **choice) if choice else plan


def lower(
    function: Function, target: str = INTERP, choice: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Module]:
    """Lower a Graph function of concrete shapes: the module of each level above Target, from Graph down.

    `choice` has the fields of the lowering plan that differ from the target's own (`tessera.runtime.planning`).
    """
    traced, *lowered = iterate_passes(function, find_plan(target, choice))
    levels = {module.level: module for _, module in lowered}
    return {**levels, "graph": traced[1]}


def iterate_passes(function: Function, plan: LoweringPlan) -> Iterator[tuple[str, Module]]:
    """Yield the module after each pass with the pass's name; the first is the traced module."""
    module = Module("graph", (function,))
    yield "trace", module
    if plan.mesh:  # an element has one program at a time
        module = module.replace(ungroup_launches(module.main), *module.functions[1:])
        yield "group vectorisation", module
    for name, step in track(list_steps(plan, function), "lowering"):
        module = step(module)
        yield name, module


def compile_level(
    levels: Mapping[str, Module], level: str, target: str = "llvm", options: Mapping[str, Any] = MappingProxyType({})
) -> RunFunction:
    """Compile a program for one level: a function that runs it in that level's interpreter.

    `options` are the generator's, where the level is "target".
    """
    if level not in LEVEL_COMPILERS:
        raise ArgumentError(f'"{level}" is not a level', expected=", ".join(LEVELS))
    return LEVEL_COMPILERS[level](levels, target, options)


def run_level(
    levels: Mapping[str, Module], level: str, arrays: Sequence[Any], target: str = "llvm"
) -> list[np.ndarray]:
    """Run a program at one level, in that level's interpreter."""
    return compile_level(levels, level, target)(arrays)


def _compile_target(levels: Mapping[str, Module], target: str, options: Mapping[str, Any]) -> RunFunction:
    generator = get_capable_backend(target, "interpreter")
    return load_interpreter(generator, emit_artifact(generator, levels["tile"], options))


LEVEL_COMPILERS: dict[str, Callable[[Mapping[str, Module], str, Mapping[str, Any]], RunFunction]] = {
    "graph": lambda levels, *_: lambda arrays: graph_interpreter.run(levels["graph"].main, arrays),
    "schedule": lambda levels, *_: lambda arrays: schedule_interpreter.run(levels["schedule"], arrays),
    "tile": lambda levels, *_: lambda arrays: tile_interpreter.run(levels["tile"], arrays),
    "target": _compile_target,
}


def takes_symbolic_sizes(device: str, asked: bool) -> bool:
    """Whether one program for a device may serve several sizes; `asked`: it may be slower than one for each."""
    target = find_generator_name(device)
    if target == INTERP:
        return False
    capabilities = get_backend(target).capabilities
    return capabilities.symbolic and (asked or not capabilities.prefers_static)


def compile_graph(
    function: Function, device: str, constants: range = range(0), donated: Collection[int] = (),
    choice: Mapping[str, Any] = MappingProxyType({}),
) -> RunFunction:  # fmt: skip
    """Compile a Graph function for a device: what runs it in the Graph interpreter or a generator's runtime.

    Where the device has a memory of its own, arrays of the device are taken and given (`Backend.memory`); `constants`
    are the places of parameters whose copies on the device are kept. Results may take the memory of the parameters at
    the places `donated`. `choice` is the schedule, as in `lower`.
    """
    run = _compile_graph(function, device, constants, donated, choice)
    return run if RUN_OBSERVER.get() is None else _note_runs(function, device, run)


def _note_runs(function: Function, device: str, run: RunFunction) -> RunFunction:
    """A compiled program that tells the observer of the context of each run."""

    def noting(arrays: Sequence[Any]) -> list[np.ndarray]:
        observer = RUN_OBSERVER.get()
        return run(arrays) if observer is None else observer.note(function, device, run, arrays)  # type: ignore[no-any-return]

    return noting


def _compile_graph(
    function: Function, device: str, constants: range, donated: Collection[int], choice: Mapping[str, Any]
) -> RunFunction:
    target = find_generator_name(device)
    if target == INTERP:
        extended = apply_graph_extensions(function)
        kept = [i for i in range(len(function.params)) if i not in donated]

        def interpret(arrays: Sequence[Any]) -> list[np.ndarray]:
            given = _copy_to_host(arrays)
            return _copy_views(graph_interpreter.run(extended, given), [given[i] for i in kept])

        return interpret
    module = lower(function, target, choice)["tile"]
    if donated and get_backend(target).capabilities.donation:
        module = reuse_donated(module, donated)
    runtime = make_runtime(module, target)
    if hasattr(runtime, "call"):
        return functools.partial(runtime.call, constants=constants) if constants else runtime.call
    return HostRun(runtime)


def _copy_views(results: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """The results with memory of their own, as every target gives them: views of arguments and of others are copied."""
    taken, own = {_find_owner(x) for x in arguments}, []
    for result in results:
        own.append(result.copy() if isinstance(result, np.ndarray) and _find_owner(result) in taken else result)
        taken.add(_find_owner(own[-1]))
    return own


def _find_owner(array: Any) -> int:
    """The number of the object whose memory an array shows."""
    while getattr(array, "base", None) is not None:
        array = array.base
    return id(array)


class HostRun:
    """Runs a program on arrays of the host; `repeat`, if its runtime has it, makes what runs on tensors at once."""

    def __init__(self, runtime: Runtime) -> None:
        self._run = runtime.run
        self.repeat: Callable[..., Any] | None = getattr(runtime, "repeat", None)

    def __call__(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        return self._run(_copy_to_host(arrays))


def apply_graph_extensions(function: Function) -> Function:
    """A Graph function after the Graph passes of its users."""
    if not function.attrs.get(PASSES):
        return function
    module = Module("graph", (function,))
    for extension in find_extensions(function, GRAPH):
        module = extension.run(module, LoweringPlan())
    return module.main


_HOST_CLASSES = {np.ndarray}


def _copy_to_host(arrays: Sequence[Any]) -> Sequence[Any]:
    """The arrays, with those of a device copied to the host."""
    classes = set(map(type, arrays))
    if classes == _HOST_CLASSES:
        return arrays
    if DeviceArray in classes or not READERS.keys().isdisjoint(classes):
        return [_copy_one_to_host(a) for a in arrays]
    return arrays


def _copy_one_to_host(array: Any) -> Any:
    if array.__class__ in READERS:  # of another library
        array = import_device_array(array)
    return array.numpy() if array.__class__ is DeviceArray else array


def compile_tile(module: Module, target: str) -> RunFunction:
    """Compile a Tile module for a target: a function that runs it."""
    if target == INTERP:
        return lambda arrays: tile_interpreter.run(module, arrays)
    return make_runtime(module, target).run


def make_runtime(module: Module, target: str, options: Mapping[str, Any] = MappingProxyType({})) -> Runtime:
    """Compile a Tile module with a generator and its options, and load it for the device."""
    generator = get_capable_backend(target, "runtime")
    return load_runtime(generator, emit_artifact(generator, module, options))
