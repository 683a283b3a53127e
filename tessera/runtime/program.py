"""Prepared program: an entry point with its arguments, lowered and ready to run at any level or on any target.

An autotuned kernel is tuned for the target first, by measurement or by a performance model.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.contract import (
    emit_artifact,
    get_backend,
    get_capable_backend,
    load_interpreter,
    load_runtime,
)
from tessera.codegen.padded_sizes import SIZE_PREFIX, PaddedSizes
from tessera.core.device import INTERP
from tessera.core.errors import ArgumentError, user_location
from tessera.core.shapes import SizeConstraint, use_size_constraints
from tessera.core.symbolic_dim import Dim, find_size_limit, symbol_names
from tessera.core.types import RefType, TensorType, Type
from tessera.frontend.jit.dynamic_shapes import SizeRules, SizeVariant, estimate_sizes
from tessera.frontend.jit.tracing import Jit, TracedFunction, to_array
from tessera.frontend.kernel import Kernel
from tessera.frontend.kernel.autotuning import Tuned
from tessera.frontend.kernel.kernel_function import KernelLaunch
from tessera.frontend.kernel.signature import KernelArguments
from tessera.frontend.kernel.symbolic_sizes import specialise_for_sizes
from tessera.interp import bound
from tessera.interp.bound import BoundSample
from tessera.interp.graph import bind_sizes
from tessera.interp.tile import interpreter as tile_interpreter
from tessera.ir.core import Function, Module, Value, find_size_names
from tessera.ir.numerics.interval_arithmetic import IntervalArray
from tessera.ir.rewrite import has_effect
from tessera.ir.tensor import Tensor
from tessera.lower.passes.canonicalisation import canonicalise
from tessera.lower.passes.size_padding import pad_sizes
from tessera.lower.passes.type_conversion import bind_to_arrays, specialise_shapes
from tessera.ops.tensor.random import RandomUse
from tessera.runtime import driver
from tessera.runtime.launch import tuner
from tessera.runtime.launch.streams import find_written_params
from tessera.runtime.planning import format_choice, tune_schedule

# Autotuned kernels of `run`, `build` and `inspect` are tuned for the target, or predicted where the device is absent.


def tune_launch(
    launch: KernelLaunch, args: Sequence[Any], named: Mapping[str, Any], target: str, options: Mapping[str, Any]
) -> Tuned | None:
    """Find the configuration of a launch for a target; None for a kernel that is not autotuned.

    It is measured or read from the cache where this machine has the target's device; else a model predicts it.

    Raises:
        ArgumentError: no configuration can run.
    """
    if launch.kernel.options.tuning is None:
        return None
    wanted = replace(launch, kernel=launch.kernel.like(replace(launch.kernel.options, target=target)))
    return tuner.tune_launch(wanted, args, named, str(options.get("arch", "")))


def format_tuning(found: Tuned) -> str:
    """Format the configuration and how it was found: "BM=64, BN=32 (fastest of 8, measured now: 0.41 ms)"."""
    chosen = format_choice(found.config)
    tried = [t for t in found.trials if t.latency_ms is not None or t.refused or found.model]
    ran = sum(not t.refused for t in tried)
    refused = f", {len(tried) - ran} could not run" if ran < len(tried) else ""
    if len(found.trials) == 1 and found.model:
        return f"{chosen} (there is no other)"
    if found.model:
        return f"{chosen} (of {ran}, by {found.model}{refused}; nothing was measured)"
    when = "measured before" if found.cached else "measured now"
    return f"{chosen} (fastest of {ran}{refused}, {when}: {found.latency_ms:.3g} ms)"


def bind_grid_inputs(grid: Any, args: Sequence[Any], named: Mapping[str, Any], names: Sequence[str] = ()) -> Any:
    """Bind a grid function of the inputs as a function of the kernel's constants, which it may also take by name.

    Inputs by position are given by the `names` of the kernel's parameters where the function takes fewer by position.
    """
    if not callable(grid):
        return grid
    parameters = inspect.signature(grid).parameters
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if not takes_any and len(_positional_names(grid, len(args))) < len(args) <= len(names):
        args, named = (), {**dict(zip(names, args, strict=False)), **named}
    taken = {*_positional_names(grid, len(args)), *named}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def of(constants: Mapping[str, Any]) -> Any:
        given = {k: v for k, v in constants.items() if k not in taken and (takes_all or k in parameters)}
        return grid(*args, **named, **given)

    return of


def _positional_names(function: Callable[..., Any], count: int) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [k for k, p in inspect.signature(function).parameters.items() if p.kind in kinds][:count]


@dataclass(frozen=True)
class PreparedProgram:
    """A lowered entry point and its arrays.

    `names` and `arrays` are the parameters in order (captured arrays last); `written` are the
    places of those that a kernel writes, which are then its results. `tuned` is how an autotuned kernel's configuration
    or a tuned function's schedule was found; None for any other entry. `random` are its draws from the default
    generator, whose state is in the last two arrays; to run the program leaves the generator as it is. `rules` are what
    it requires of symbolic sizes, and `variant` is which of several programs for them it is. `padding` tells how its
    arrays are padded, if they are.
    """

    name: str
    levels: Mapping[str, Module]
    names: tuple[str, ...]
    arrays: tuple[np.ndarray, ...]
    written: tuple[int, ...] = ()
    tuned: Tuned | None = None
    random: RandomUse | None = None
    rules: SizeRules = field(default_factory=SizeRules)
    variant: SizeVariant | None = None
    padding: PaddedSizes | None = None
    # What generators have emitted, by target and options, with the module that it was emitted for.
    _emitted: dict[Any, tuple[Module, Artifact]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def top(self) -> str:
        """The highest level this program has: "graph", or "tile" for a kernel."""
        return next(iter(self.levels))

    @property
    def choice(self) -> Mapping[str, Any]:
        """The fields of the target's lowering plan that a tuned function changes; {} for any other."""
        return self.tuned.config if self.tuned is not None and self.top == "graph" else {}

    @property
    def conditions(self) -> list[SizeConstraint]:
        """What the sizes of a call must fulfil: its constraints as a variant, and what it requires."""
        own = self.variant.constraints if self.variant else ()
        held = {c.text for c in own}
        return [*own, *(c for c in (*self.rules.constraints, *self.rules.guards) if c.text not in held)]

    def run(self, level: str, target: str = INTERP) -> list[np.ndarray]:
        """Run the program in a level's interpreter, or with level "device" in a target's runtime."""
        return self.compile(level, target)()

    def compile(
        self, level: str, target: str = INTERP, options: Mapping[str, Any] = MappingProxyType({})
    ) -> ExecutableProgram:
        """Compile the program for a level, or with level "device" for a target; `options` are the generator's."""
        levels = self.lower_for_target(target)
        if level == "device" and target != INTERP:
            runtime = load_runtime(get_capable_backend(target, "runtime"), self.emit(target, options, levels["tile"]))
            return ExecutableProgram(self, runtime.run, runtime)
        level = "tile" if level == "device" else level
        if level == "target":
            generator = get_capable_backend(target, "interpreter")
            function = load_interpreter(generator, self.emit(target, options, levels["tile"]))
        elif level not in levels:
            raise make_level_error(self, level, levels)
        else:
            function = driver.compile_level(levels, level, target, options)
        return ExecutableProgram(self, function, getattr(function, "__self__", None))

    def emit(
        self, target: str, options: Mapping[str, Any] = MappingProxyType({}), module: Module | None = None
    ) -> Artifact:
        """What a target's generator emits for the program, or for its Tile module `module`: once for all its runs."""
        module = self.lower_for_target(target)["tile"] if module is None else module
        key = (target, repr(sorted(options.items())))
        held = self._emitted.get(key)
        if held is None or held[0] is not module:
            held = self._emitted[key] = (module, emit_artifact(get_backend(target), module, options))
        return held[1]

    def lower_for_target(self, target: str) -> Mapping[str, Module]:
        """Return the levels for a target: a mesh of processing elements has its own lowering, of known sizes."""
        graph = self.levels.get("graph")
        if graph is not None and target != INTERP and find_size_names(graph.main):
            if driver.takes_symbolic_sizes(target, asked=True):
                return self.levels
            sizes = bind_sizes(graph.main, self.arrays)
            return driver.lower(specialise_shapes(graph.main, sizes), target)
        if graph is None and target != INTERP and not driver.takes_symbolic_sizes(target, asked=True):
            bound = bind_to_arrays(self.levels["tile"], self.arrays)
            return {"tile": bound.replace(*map(canonicalise, bound.functions))}
        wanted = None if self.top != "graph" or target == INTERP else driver.find_plan(target).mesh
        held = self.levels["tile"].functions[1:2]
        if wanted is None or (held and held[0].attrs.get("mesh") == wanted):
            return self.levels
        return driver.lower(self.levels["graph"].main, target)

    def bounds(self, between: Callable[[], None] | None = None) -> list[IntervalArray]:
        """Compute the results with their error bounds: how far any legal evaluation may lie from them (design 5)."""
        if self.top == "graph":
            return bound.run(self.levels["graph"].main, list(self.arrays), between)
        return tile_interpreter.run_with_bounds(self.levels["tile"], list(self.arrays), self.written, (), between)

    def sample_bounds(self, seconds: float, patience: float = 0.0) -> BoundSample | None:
        """As `bounds`, in about `seconds`: of some programs of a large grid.

        Programs that are more than one launch, or communicate, can only be run as a whole: in `patience` seconds if
        that is more. None where it takes longer.
        """

        def sample(seconds: float) -> BoundSample | None:
            return tile_interpreter.sample_with_bounds(self.levels["tile"], self.arrays, self.written, seconds)

        sampled = tile_interpreter.has_independent_programs(self.levels["tile"])
        if sampled and self.top != "graph":
            return sample(seconds)
        try:
            limit = bound.make_time_limit(seconds if sampled else max(seconds, patience))
            return BoundSample(self.bounds(limit), 1, 1)
        except bound.TimeLimitReached:
            return sample(seconds / 2) if sampled else None


@dataclass(frozen=True)
class ExecutableProgram:
    """A prepared program, ready to run at one level; `runtime` is what a generator made, if one did."""

    program: PreparedProgram
    function: driver.RunFunction
    runtime: Any = None

    def __call__(self) -> list[np.ndarray]:
        """Run on fresh copies of the arrays that the program writes, which are then its last results."""
        return self.timed()[0]

    def timed(self) -> tuple[list[np.ndarray], float]:
        """As a call, with the seconds that it took without the copies."""
        program = self.program
        arrays = [a.copy() if i in program.written else a for i, a in enumerate(program.arrays)]
        start = time.perf_counter()
        results = self.function(arrays)
        seconds = time.perf_counter() - start
        return [*results, *(arrays[i] for i in program.written)], seconds


def make_level_error(program: PreparedProgram, level: str, levels: Mapping[str, Module] | None = None) -> ArgumentError:
    """The error for a level that a program, or its lowering for a target, does not have."""
    return ArgumentError(
        f"{program.name} has no {level} level", received=level,
        expected=", ".join([*(program.levels if levels is None else levels), "target"]),
        suggestion="a kernel starts at the Tile level; a program on a mesh is lowered from Graph to Tile",
    )  # fmt: skip


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a call: by position and by name."""

    args: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)


def prepare(
    entry: Any, arguments: Any, target: str = INTERP, grid: Any = None, group: int | None = None,
    tune: bool = False, options: Mapping[str, Any] = MappingProxyType({}), lower: bool = True, dynamic: Any = None,
    variant: SizeVariant | None = None,
) -> PreparedProgram:  # fmt: skip
    """Trace or specialise an entry point for these arguments and lower it for a target.

    `arguments` are CallArguments, a mapping of names to arguments, or a sequence. Without `lower` the program stays at
    its first level. A KernelLaunch is prepared with its own grid and group.

    An autotuned kernel is tuned for the target if `tune` asks for it, or read from the cache of what was found before
    (tessera/runtime/program.py); else it is taken in its first configuration. `options` are the generator's, where
    one will emit. `dynamic` names symbolic sizes, as in `build`, and `variant` is one of several programs for them.
    """
    args, named = _split_arguments(arguments)
    has_own_grid = isinstance(entry, KernelLaunch) and entry.grid is not None  # a function of constants, not of inputs
    if isinstance(entry, KernelLaunch):
        entry, grid, group = _split_launch(entry, grid, group)
    if isinstance(entry, Kernel):
        places = list(entry.parameters.signature.parameters)

        def make_grid(args: Sequence[Any], named: Mapping[str, Any]) -> Any:
            return grid if has_own_grid else bind_grid_inputs(grid, args, named, places)

        launch = KernelLaunch(entry, make_grid(args, named), group)
        found = tune_launch(launch, args, named, target, options) if tune else None
        chosen = replace(launch, kernel=entry if found is None else entry.configured(found.config))
        if dynamic:
            return _prepare_symbolic_kernel(
                chosen, CallArguments(tuple(args), named), make_grid, found, (dynamic, variant)
            )
        return _prepare_kernel(chosen, args, named, found)
    if not isinstance(entry, Jit):
        raise ArgumentError(
            f"{getattr(entry, '__name__', type(entry).__name__)} is not a program", location=user_location(),
            expected="a function under @ts.jit or @ts.kernel", suggestion="wrap it: ts.jit(function)",
        )  # fmt: skip
    call = entry.bind(tuple(args), named)
    traced = entry.trace_dynamic(tuple(args), named, dynamic, variant) if dynamic else entry.trace(*args, **named)
    _check_results(traced.function)
    state = traced.random.peek() if traced.random is not None else ()
    arrays = (*(to_array(leaf) for leaf in call.leaves), *traced.captures, *state)
    names = tuple(p.hint for p in traced.function.params)
    if dynamic and target != INTERP and not driver.takes_symbolic_sizes(target, asked=True):
        return _prepare_padded(traced, names, arrays, target)
    found = tune_schedule(traced.function, target, arrays) if tune and entry.tune and not dynamic else None
    choice = found.config if found is not None else {}
    sized = estimate_sizes(traced.function, arrays, variant.sizes if variant else None) if dynamic else nullcontext()
    with sized:
        traced_levels = {"graph": Module("graph", (traced.function,))}
        levels = driver.lower(traced.function, target, choice) if lower else traced_levels
    made = PreparedProgram(traced.function.name, levels, names, arrays, tuned=found, random=traced.random)
    return replace(made, rules=traced.rules, variant=variant)


def _check_results(function: Function) -> None:
    """Refuse a program without results: a function whose `return` was forgotten.

    Raises:
        ArgumentError: the function returns no tensor and has no effect.
    """
    if not function.results and not any(map(has_effect, function.body.nodes)):
        raise ArgumentError(
            f"{function.name} returns nothing, so that its program would be empty", location=function.loc,
            expected="a function that returns a tensor", suggestion="return what it computes",
        )  # fmt: skip


def _prepare_padded(
    traced: TracedFunction, names: tuple[str, ...], arrays: Sequence[np.ndarray], target: str
) -> PreparedProgram:
    """A program for a target of known sizes, which takes all sizes up to those of the example or of a constraint."""
    function, rules = traced.function, traced.rules
    sizes = bind_sizes(function, arrays)
    constraints = (*rules.constraints, *rules.guards)
    with use_size_constraints(constraints):
        limits = {name: find_size_limit(Dim.of(name)) for name in sizes}
    upper = {name: int(most) if math.isfinite(most) else sizes[name] for name, most in limits.items()}
    padded = pad_sizes(function, upper)
    patterns = tuple(tuple(p.type.shape) for p in function.params)
    ordered = {name: upper[name] for name in padded.names}
    padding = PaddedSizes(ordered, names, patterns, padded.results, constraints)
    levels = driver.lower(padded.function, target)
    names = (*names, *(f"{SIZE_PREFIX}{name}" for name in ordered))
    made = PreparedProgram(function.name, levels, names, tuple(padding.pad(arrays, sizes)), random=traced.random)
    return replace(made, rules=rules, padding=padding)


def _prepare_kernel(
    launch: KernelLaunch, args: Sequence[Any], named: dict[str, Any], how: Tuned | None
) -> PreparedProgram:
    entry = launch.kernel
    found = entry.bind(args, named)
    module = entry.specialize(found.types, found.constants, *entry.plan(found, launch.grid, launch.group))
    return _make_kernel_program(entry, found, module, how)


def _prepare_symbolic_kernel(
    launch: KernelLaunch,
    arguments: CallArguments,
    make_grid: Callable[..., Any],
    how: Tuned | None,
    dynamic: tuple[Any, SizeVariant | None],
) -> PreparedProgram:
    """A kernel of symbolic sizes, whose grid follows from arguments of these sizes."""
    entry = launch.kernel
    found = entry.bind(arguments.args, arguments.named)
    places = list(entry.parameters.signature.parameters)

    def grid_of(types: Mapping[str, Type]) -> Any:
        args = [_stand_in(types.get(n), x) for n, x in zip(places, arguments.args, strict=False)]
        return make_grid(args, {n: _stand_in(types.get(n), x) for n, x in arguments.named.items()})

    made = specialise_for_sizes(entry, found, grid_of, launch.group, *dynamic)
    return replace(_make_kernel_program(entry, found, made.module, how), rules=made.rules, variant=dynamic[1])


def _stand_in(type: Any, argument: Any) -> Any:
    """For a memory of symbolic sizes a tensor that has them; any other argument as it is."""
    if not isinstance(type, RefType) or not symbol_names(type.shape):
        return argument
    return Tensor(Value(TensorType(type.shape, type.dtype, type.policy)))


def _make_kernel_program(entry: Kernel, found: KernelArguments, module: Module, how: Tuned | None) -> PreparedProgram:
    name, written = entry.kernel_function.__name__, find_written_params(module)
    return PreparedProgram(name, {"tile": module}, tuple(found.types), tuple(found.arrays), written, how)


def _split_launch(launch: KernelLaunch, grid: Any, group: int | None) -> tuple[Kernel, Any, int | None]:
    """The kernel, the grid and the group of a launch; a second grid or group is refused."""
    for name, own, other in (("grid", launch.grid, grid), ("group", launch.group, group)):
        if own is not None and other is not None:
            raise ArgumentError(
                f"the {name} of {launch.kernel!r} is set twice", location=user_location(),
                expected=f"kernel[grid, group] or {name}=, not both", received=f"{own!r} and {name}={other!r}",
            )  # fmt: skip
    return launch.kernel, launch.grid if grid is None else grid, launch.group if group is None else group


def _split_arguments(arguments: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    if isinstance(arguments, CallArguments):
        return arguments.args, dict(arguments.named)
    return ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
