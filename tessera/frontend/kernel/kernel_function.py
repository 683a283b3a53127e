"""Kernels: a Python function over tiles, specialised for each kind of arguments and launched on a grid.

Here are the class, the decorators that make kernels (plain, with a schedule, autotuned), and launch hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.device import default_device
from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError, OutOfBoundsError, ShapeError, hides_internal_frames, user_location
from tessera.core.hooks import (
    apply_configuration,
    generate_kernel,
    order_launch,
    record_launch,
    run_module,
    sequence_ops,
    tune_launch,
)
from tessera.core.schedule import ACTIVE_SCHEDULE, Schedule
from tessera.core.shapes import SizeConstraint, find_size_constraints
from tessera.core.symbolic_dim import Dim, Size, symbol_names
from tessera.core.types import Type
from tessera.frontend.jit.line_marks import LINE_MARKS_ENABLED
from tessera.frontend.kernel import autotuning as tuning
from tessera.frontend.kernel.autotuning import Evolutionary, Tuned, TuningSettings, split_configuration
from tessera.frontend.kernel.signature import KernelArguments, make_array, read_parameters
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.core import Module
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.argument_checks import check_function

if TYPE_CHECKING:
    from tessera.frontend.kernel.specialisation import SpecialisedKernel


@dataclass(frozen=True)
class LaunchInfo:
    """A launch: the kernel's name, grid, group and target, its constants, and its arrays by parameter."""

    kernel: str
    grid: tuple[int, ...]
    group: int
    target: str
    constants: Mapping[str, Any]
    arrays: Mapping[str, Any]


LaunchHook = Callable[[LaunchInfo], Any]


@dataclass(frozen=True)
class LaunchHooks:
    """The hooks of a kernel, in the order in which they were added."""

    before: list[LaunchHook] = field(default_factory=list)
    after: list[LaunchHook] = field(default_factory=list)


@dataclass(frozen=True)
class KernelCall:
    """A launch as a derivative rule of its kernel sees it: tensors by the names of the kernel's parameters.

    `inputs` are the memories before the launch, `outputs` the written ones after it, `constants` all other arguments. A
    rule for reverse mode has the `cotangents` of written floats, and one for forward mode the `tangents` of inputs.
    """

    grid: tuple[int, ...]
    group: int
    constants: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    cotangents: Mapping[str, Any] = field(default_factory=dict)
    tangents: Mapping[str, Any] = field(default_factory=dict)


DerivativeFunction = Callable[[KernelCall], Mapping[str, Any]]


@dataclass
class KernelRules:
    """The derivative rules of a kernel; without one the derivative follows from the kernel's Tile IR."""

    vjp: DerivativeFunction | None = None
    jvp: DerivativeFunction | None = None

    def __bool__(self) -> bool:
        return self.vjp is not None or self.jvp is not None


@dataclass(frozen=True)
class KernelOptions:
    """The options of @kernel."""

    tile_shape: tuple[int, ...] = ()
    shared_memory: int = 0
    num_warps: int = 4
    autotune: bool = False
    autotune_configs: tuple[Mapping[str, Any], ...] = ()
    target: str | None = None
    schedule: Schedule | None = None
    tuning: TuningSettings | None = None


class Kernel:
    """A kernel: `k[grid](args…)` and `k[grid, group](args…)` launch it, `k(args…)` with a launch of its own choice.

    A grid is an int or a tuple of ints, or a function of the constants that gives one; beside a group
    size it is written as a tuple: `k[(8,), 128]`. Arrays are written in place.
    """

    def __init__(self, function: FunctionType, options: KernelOptions) -> None:
        functools.update_wrapper(self, function)  # type: ignore[arg-type]
        self.kernel_function = function
        self.options = options
        self.__requires__ = find_size_constraints(function)
        self.parameters = read_parameters(function)
        self.hooks = LaunchHooks()
        self.rules = KernelRules()
        self._cache: dict[Any, SpecialisedKernel] = {}
        self._recorded: dict[Any, _RecordedCall] = {}
        self._configured: dict[Any, Kernel] = {}

    def __getitem__(self, item: Any) -> KernelLaunch:
        grid, group = item if isinstance(item, tuple) and len(item) == 2 and _looks_like_grid(item[0]) else (item, None)
        return KernelLaunch(self, grid, group)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return KernelLaunch(self, None, None)(*args, **named)

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> KernelArguments:
        """Bind a call's arguments; the schedule or the first autotune configuration supplies missing constants."""
        free = list(self.parameters.signature.parameters)[len(args) :]
        configs = self.options.autotune_configs
        missing = {**(configs[0] if configs else {}), **self._scheduled()}
        found = self.parameters.bind(tuple(args), named, {k: v for k, v in missing.items() if k in free})
        if constraints := find_size_constraints(self):
            self._check_sizes(constraints, found.types)
        return found

    def _check_sizes(self, constraints: Sequence[SizeConstraint], types: Mapping[str, Type]) -> None:
        """Check the sizes of a call against the kernel's constraints (`ts.require`)."""
        sizes = self.parameters.sizes(types)
        try:
            for constraint in constraints:
                constraint.check(sizes)
        except ShapeError as error:
            raise error.at(user_location()) from None

    def _scheduled(self) -> dict[str, Any]:
        schedule = self.options.schedule
        return schedule.constants(self.parameters.constants) if schedule else {}

    @property
    def schedule(self) -> Schedule:
        """The kernel's schedule; empty by default."""
        return self.options.schedule or Schedule()

    def with_schedule(self, schedule: Schedule) -> Kernel:
        """A new kernel with the fields of a schedule bound to its constants (tessera/core/schedule.py).

        Constants of a call take precedence over those of the schedule. `warps` is the default group of a
        kernel that asks for one; where no constant takes the block sizes they become the `tile_shape`.

        Raises:
            ArgumentError: this is no Schedule.
        """
        return self.like(_apply_schedule(self.options, schedule, self.parameters.constants))

    def follows(self, schedule: Schedule) -> bool:
        """Whether the fields of a schedule are those of the kernel's own."""
        own = self.schedule.given
        return all(own.get(name) == value for name, value in schedule.given.items())

    def scheduled(self, schedule: Schedule) -> Kernel:
        """This kernel with the fields of a schedule in place of its own; made once for each."""
        key = ("schedule", schedule)
        if key not in self._configured:
            self._configured[key] = self.with_schedule(self.schedule.derive(**schedule.given))
        return self._configured[key]

    def like(self, options: KernelOptions) -> Kernel:
        """This kernel with other options, and the same hooks."""
        made = Kernel(self.kernel_function, options)
        made.hooks, made.rules = self.hooks, self.rules
        made.__requires__ = find_size_constraints(self)
        return made

    def vjp(self, rule: DerivativeFunction) -> DerivativeFunction:
        """Decorate the kernel's rule for reverse mode: `rule(call)` returns cotangents of `call.inputs` by name.

        `call.cotangents` has those of the written memories. An input that the rule leaves out has the cotangent zero.

        >>> import tessera as ts
        >>> from tessera import tile
        >>> @ts.kernel
        ... def square(x, out):
        ...     out[0:2] = x[0:2] * x[0:2]
        >>> @square.vjp
        ... def square_vjp(call):
        ...     return {"x": 2.0 * call.inputs["x"] * call.cotangents["out"]}
        >>> ts.grad(lambda x: ts.launch(square, (1,), x, ts.like(x)).sum())(ts.Tensor([1.0, 3.0]))
        Tensor([2., 6.], f32)
        """
        check_function(rule, "vjp")
        self.rules.vjp = rule
        return rule

    def jvp(self, rule: DerivativeFunction) -> DerivativeFunction:
        """Decorate the kernel's rule for forward mode: `rule(call)` returns tangents of `call.outputs` by name.

        `call.tangents` has those of the inputs. An output that the rule leaves out has the tangent zero.

        >>> import tessera as ts
        >>> from tessera import tile
        >>> @ts.kernel
        ... def square(x, out):
        ...     out[0:2] = x[0:2] * x[0:2]
        >>> @square.jvp
        ... def square_jvp(call):
        ...     return {"out": 2.0 * call.inputs["x"] * call.tangents["x"]}
        >>> ts.jvp(lambda x: ts.launch(square, (1,), x, ts.like(x)), (ts.Tensor([1.0, 3.0]),), (ts.ones(2),))[1]
        Tensor([2., 6.], f32)
        """
        check_function(rule, "jvp")
        self.rules.jvp = rule
        return rule

    def configured(self, config: Mapping[str, Any]) -> Kernel:
        """This kernel with the constants and schedule fields of a configuration, and no tuning of its own."""
        key = tuple((k, _make_hashable(v)) for k, v in sorted(config.items()))
        if key not in self._configured:
            constants, fields = split_configuration(config, self.parameters.constants)
            first = {**(self.options.autotune_configs or ({},))[0], **constants}
            made = self.like(replace(self.options, tuning=None, autotune_configs=(first,)))
            self._configured[key] = made.with_schedule(self.schedule.derive(**fields)) if fields else made
        return self._configured[key]

    def before(self, hook: LaunchHook) -> LaunchHook:
        """Call `hook(started)` before each launch (see tessera/frontend/kernel/kernel_function.py); a decorator."""
        self.hooks.before.append(hook)
        return hook

    def after(self, hook: LaunchHook) -> LaunchHook:
        """Call `hook(started)` after each launch that completed; a decorator."""
        self.hooks.after.append(hook)
        return hook

    def plan(self, found: KernelArguments, grid: Any, group: int | None) -> tuple[tuple[Size, ...], int]:
        """Choose the launch: as requested, or the default. In a trace of symbolic sizes a grid has them too."""
        if callable(grid):
            grid = grid({**self.parameters.sizes(found.types), **found.constants})
        if grid is not None and group is not None:
            return _check_grid(grid), _check_size("group", group, 1)
        from tessera.frontend.kernel import specialisation
        from tessera.frontend.kernel.python_ast.source import read_source

        body = read_source(self.kernel_function).body
        if grid is not None:
            return _check_grid(grid), specialisation.choose_thread_count(body, self.options.num_warps)
        chosen, size = specialisation.choose_launch(body, found.types, self.options.tile_shape, self.options.num_warps)
        return chosen, _check_size("group", size if group is None else group, 1)

    def specialize(
        self, arg_types: Mapping[str, Type], constants: Mapping[str, Any], grid: tuple[Size, ...] = (1,), group: int = 1
    ) -> Module:
        """The Tile module for these argument types and this launch, compiled once."""
        return self._specialise(arg_types, constants, grid, group).module

    def _specialise(
        self, arg_types: Mapping[str, Type], constants: Mapping[str, Any], grid: tuple[Size, ...], group: int
    ) -> SpecialisedKernel:
        named = tuple((k, _make_hashable(v)) for k, v in constants.items())
        key = (tuple(arg_types.items()), named, grid, group, LINE_MARKS_ENABLED.get())
        found = None if self._has_symbols(arg_types, grid) else self._cache.get(key)
        if found is None or not found.unchanged():
            from tessera.frontend.kernel.specialisation import (  # late: a program may only import kernels
                SpecialisationRequest,
                specialise,
            )

            options = self.options
            hints = (self.schedule.stages, self.schedule.cluster)
            request = SpecialisationRequest(
                arg_types, constants, grid, group, options.tile_shape, options.shared_memory, *hints
            )
            found = self._cache[key] = specialise(self.kernel_function, self.parameters, request)
        return found

    def _has_symbols(self, types: Mapping[str, Type], grid: tuple[Size, ...]) -> bool:
        """Whether sizes are symbols: what the kernel decides by them holds for one trace, whose guards state it."""
        return bool(symbol_names((*grid, *(s for t in types.values() for s in t.shape))))

    def bind_launch(self, launch: KernelLaunch, args: Any, named: Mapping[str, Any]) -> tuple[Module, KernelArguments]:
        """The module of a call and its arguments; a call as one before it skips the signature and the annotations."""
        key = self._make_call_key(launch, args, named)
        known = None if key is None else self._recorded.get(key)
        if known is not None and known.specialised.unchanged():
            return known.specialised.module, known.bind((*args, *named.values()))
        found = self.bind(args, named)
        specialised = self._specialise(found.types, found.constants, *self.plan(found, launch.grid, launch.group))
        names = [*self.parameters.signature.parameters][: len(args)] + [*named]
        if key is not None and all(name in names for name in found.types):
            places = tuple((names.index(name), type) for name, type in found.types.items())
            self._recorded[key] = _RecordedCall(specialised, found, places)
        return specialised.module, found

    def _make_call_key(self, launch: KernelLaunch, args: Any, named: Mapping[str, Any]) -> Any:
        """What `bind` and `plan` depend on, with other values left out; None: the call is not recorded.

        Arrays count by shape and element type, numbers that are no constants by type, constants by value.
        """
        constants, names, grid = self.parameters.constants, self.parameters.signature.parameters, launch.grid
        if len(args) > len(names) or not (
            grid is None or _INT.issuperset(map(type, grid if grid.__class__ is tuple else (grid,)))
        ):
            return None
        key: list[Any] = [launch.grid, launch.group, LINE_MARKS_ENABLED.get(), *named]
        for name, x in (*zip(names, args, strict=False), *named.items()):
            kind = x.__class__
            if kind is np.ndarray:
                key.append((x.shape, x.dtype))
            elif kind is Tensor and x.data.__class__ in _ELEMENTS:
                key.append(x.type)
            elif kind in _NUMBER_TYPES and name not in constants:
                key.append(kind)
            elif kind in _CONSTANT_TYPES:
                key.append((kind, x))
            else:
                return None
        return tuple(key)

    def __repr__(self) -> str:
        return f"<kernel {self.kernel_function.__name__}>"


_INT = frozenset((int,))
_ELEMENTS = frozenset((np.ndarray, DeviceArray))
_NUMBER_TYPES = frozenset((bool, int, float))
_CONSTANT_TYPES = frozenset((bool, int, float, str, type(None)))


@dataclass(frozen=True)
class _RecordedCall:
    """A call that was bound: its kernel, its arguments, and where those of run time stand among the call's values."""

    specialised: SpecialisedKernel
    found: KernelArguments
    places: tuple[tuple[int, Type], ...]

    def bind(self, values: Sequence[Any]) -> KernelArguments:
        """The arguments of a call of the same kind."""
        arrays = tuple([make_array(values[place], type) for place, type in self.places])
        return KernelArguments(self.found.types, arrays, self.found.constants, self.found.tensors)


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel with its grid and group chosen (None: by default), waiting for arguments."""

    kernel: Kernel
    grid: Any = None
    group: int | None = None

    @hides_internal_frames
    def __call__(self, *args: Any, **named: Any) -> Any:
        if (active := ACTIVE_SCHEDULE.get()) is not None and not self.kernel.follows(active):
            return replace(self, kernel=self.kernel.scheduled(active))(*args, **named)
        if CURRENT_BUILDER.get() is not None:
            return record_launch(self, args, named)
        if self.kernel.options.tuning is not None:
            return apply_configuration(self, self.tune(*args, **named).config)(*args, **named)
        module, found = self.kernel.bind_launch(self, args, named)
        stream = order_launch(module, lambda: dict(zip(found.types, found.arrays, strict=True)))
        if stream is not None:
            return stream.queue(lambda: self.run(module, found))
        return self.run(module, found)

    def run(self, module: Module, found: KernelArguments) -> Any:
        """Run the module of this launch on bound arguments, between the kernel's hooks."""
        started = self._started(module, found)
        for hook in self.kernel.hooks.before:
            hook(started)
        try:
            outputs = run_module(module, found.arrays, self.kernel.options.target)
        except OutOfBoundsError as error:
            grid = module.functions[1].attrs["grid"]
            if self.grid is None and not self.kernel.options.tile_shape and tuple(grid) != (1,):
                programs = ", ".join(str(n) for n in grid)
                name = self.kernel.__name__  # type: ignore[attr-defined]
                error.suggestion = (
                    f"choose the grid: without one a program runs for each element, {name}[({programs},)](...)"
                )
            raise
        for hook in self.kernel.hooks.after:
            hook(started)
        results = [Tensor(a) if found.tensors else a for a in outputs]
        return tuple(results) if len(results) > 1 else results[0] if results else None

    def tune(self, *args: Any, **named: Any) -> Tuned:
        """Find the best configuration of an autotuned kernel for these arguments: measured on copies, or cached.

        Raises:
            ArgumentError: the kernel is not autotuned, or no configuration can run.
        """
        if self.kernel.options.tuning is None:
            raise ArgumentError(
                f"{self.kernel!r} is not autotuned", location=user_location(), expected="@kernel.autotune(...)"
            )
        return tune_launch(self, args, named)

    def _started(self, module: Module, found: KernelArguments) -> Any:
        if not self.kernel.hooks.before and not self.kernel.hooks.after:
            return None
        function = module.functions[1]
        target = self.kernel.options.target or default_device()
        arrays = dict(zip(found.types, found.arrays, strict=True))
        grid, group = function.attrs["grid"], function.attrs["group"]
        return LaunchInfo(function.name, grid, group, target, found.constants, arrays)

    def module(self, *args: Any, **named: Any) -> Module:
        """The Tile module that a call with these arguments runs; of an autotuned kernel, in its first configuration."""
        return self._module(self.kernel.bind(args, named))

    def _module(self, found: KernelArguments) -> Module:
        grid, group = self.kernel.plan(found, self.grid, self.group)
        return self.kernel.specialize(found.types, found.constants, grid, group)


def _apply_schedule(options: KernelOptions, schedule: Any, constants: frozenset[str]) -> KernelOptions:
    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"{schedule!r} is not a schedule", location=user_location(), expected="ts.Schedule(...)",
            suggestion="ts.Schedule(block=(64, 64), warps=4)",
        )  # fmt: skip
    blocks = {k: v for k, v in schedule.given.items() if k.startswith(("block", "tile"))}
    shape = options.tile_shape if Schedule(**blocks).constants(constants) else schedule.block or options.tile_shape
    return replace(options, schedule=schedule, tile_shape=shape, num_warps=schedule.warps or options.num_warps)


def _looks_like_grid(item: Any) -> bool:
    return isinstance(item, (tuple, list)) or callable(item)


def _check_grid(grid: Any) -> tuple[Size, ...]:
    listed = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    return tuple(n if isinstance(n, Dim) else _check_size("grid", n) for n in listed) or (1,)


def _suggest_size(number: Any) -> str:
    if isinstance(number, Tensor) and number.is_traced:
        return "a launch has its size before the program runs: use sizes, x.shape[0], or a static argument of ts.jit"
    return "beside a group size the grid is a tuple: kernel[(8,), 128]"


def _check_size(what: str, number: Any, least: int = 0) -> int:
    if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < least:
        raise ArgumentError(
            f"{number!r} is not a {what} size", location=user_location(), expected=f"an int of at least {least}",
            suggestion=_suggest_size(number),
        )  # fmt: skip
    return int(number)


def _make_hashable(value: Any) -> Any:
    """Make a hashable key of a constant: by value, with its type (1, 1.0 and True differ)."""
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(_make_hashable(v) for v in value))
    if isinstance(value, dict):
        return (dict, tuple((k, _make_hashable(v)) for k, v in value.items()))
    try:
        hash(value)
    except TypeError:
        return _IdentityKey(value)
    return (type(value), value)


class _IdentityKey:
    """A value compared by identity; kept alive, so that its id is not reused."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    tile_shape: Sequence[int] | None = None,
    shared_memory: int = 0,
    num_warps: int = 4,
    autotune: bool = False,
    autotune_configs: Sequence[Mapping[str, Any]] | None = None,
    target: str | None = None,
) -> Any:
    """Make a kernel of a Python function; plain, or with options.

    >>> from tessera import Tensor, tile
    >>> @kernel
    ... def double(x: Tensor["N"]):
    ...     i = tile.program_id(0)
    ...     x[i] *= 2.0
    """
    shape = tuple(tile_shape or ())
    options = KernelOptions(shape, shared_memory, num_warps, autotune, tuple(autotune_configs or ()), target)
    make = functools.partial(_make_kernel, options=options)
    return make if function is None else make(function)


def with_schedule(schedule: Schedule, **options: Any) -> Callable[[Callable[..., Any]], Kernel]:
    """`@kernel.with_schedule(s)` and `@kernel.schedule(s)`: a kernel whose constants the schedule gives.

    Takes a Python function (with the options of @kernel) or a kernel.

    >>> @kernel.with_schedule(Schedule(block=64))
    ... def double(x, *, BM: int = 16):
    ...     i = tile.program_id(0) * BM
    ...     x[i : i + BM] *= 2.0
    >>> double.schedule
    Schedule(block_m=64)
    """

    def decorated(function: Callable[..., Any]) -> Kernel:
        made = function if isinstance(function, Kernel) else kernel(function, **options)
        return made.with_schedule(schedule)

    return decorated


def _make_kernel(function: Any, options: KernelOptions) -> Kernel:
    """Make a kernel; with `autotune` one that tries its configurations, by default a few block sizes."""
    check_function(function, "kernel")
    made = Kernel(function, options)
    if not options.autotune:
        return made
    configs = options.autotune_configs
    settings = tuning.make_settings(configs=configs) if configs else tuning.default_settings(made.parameters.constants)
    return make_autotuned(made, settings) if settings else made


def make_autotuned(made: Kernel, settings: TuningSettings) -> Kernel:
    """Make a kernel that tries configurations at its first launch for each kind of arguments."""
    first = made.configured(settings.configs[0])
    return made.like(replace(first.options, tuning=settings, autotune=True))


def autotune(space: Any = None, *, options: Mapping[str, Any] | None = None, **settings: Any) -> Callable[..., Kernel]:
    """`@kernel.autotune(space=dict(BM=[64, 128]), ...)`: a kernel whose constants are chosen by measuring.

    Takes `space` or `configs`, `constraints`, `metric`, `budget_ms`, `cache`, `samples` and `search`; a list of
    configurations in the place of `space` is `configs`. `options` are those of @kernel. The first launch with arguments
    of new types runs every configuration on copies of them, on the kernel's own target, and the best is kept in a file.
    A grid must follow from the constants: `k[lambda c: (-(-n // c["BM"]),)]`. `k[grid].tune(...)` tells what was found.

    >>> @autotune(space={"BLOCK": [2, 4]}, cache=False)
    ... def double(x, *, BLOCK: int = 4):
    ...     i = tile.program_id(0) * BLOCK
    ...     x[i : i + BLOCK] *= 2.0
    >>> len(double.options.tuning.configs)
    2
    """

    def decorated(function: Callable[..., Any]) -> Kernel:
        made = function if isinstance(function, Kernel) else kernel(function, **(options or {}))
        return make_autotuned(made, tuning.make_settings(space, **settings))

    return decorated


def search_space(constraints: Sequence[Any] = (), **space: Any) -> Callable[..., Kernel]:
    """`@autotune.search_space(BM=[64, 128], constraints=[...])`: as `autotune(space=..., constraints=...)`."""
    return autotune(space, constraints=constraints)


def evolutionary(
    population_size: int = 50, generations: int = 20, mutation_rate: float = 0.1, crossover_rate: float = 0.7,
    seed: int = 0, space: Any = None, **settings: Any,
) -> Callable[[Callable[..., Any]], Kernel]:  # fmt: skip
    """`@autotune.evolutionary(population_size=50, generations=20)`: a genetic search
    (tessera/frontend/kernel/autotuning.py).

    Without a `space` it searches a few sizes (16 to 128) for each constant that means a block, as `kernel.auto`.

    Raises:
        ArgumentError: a rate or size is none, or there is neither a space nor a constant that means a block.
    """
    search = Evolutionary(population_size, generations, mutation_rate, crossover_rate, seed)

    def decorated(function: Callable[..., Any]) -> Kernel:
        made = function if isinstance(function, Kernel) else kernel(function)
        searched = tuning.default_space(made.parameters.constants) if space is None else space
        return autotune(searched, search=search, **settings)(made)

    return decorated


def auto(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`@kernel.auto`: a kernel that tries a few sizes (16 to 128) for each block-size constant."""
    return kernel(function, autotune=True, **options)


# `kernel` is a function; these are its attributes.
kernel.__dict__.update(with_schedule=with_schedule, schedule=with_schedule, autotune=autotune, auto=auto)
kernel.__dict__.update(generate=generate_kernel, sequence=sequence_ops)
autotune.__dict__.update(search_space=search_space, evolutionary=evolutionary)
