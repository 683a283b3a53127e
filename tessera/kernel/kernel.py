"""@kernel: a Python function over tiles, compiled for each kind of arguments and launched on a grid."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.device import default_device
from tessera.errors import ArgumentError, here
from tessera.ir.core import Module
from tessera.kernel import launch
from tessera.kernel.hooks import Hook, Hooks, Started
from tessera.kernel.signature import Arguments, parameters
from tessera.kernel.streaming import ordered
from tessera.kernel.tuning.configurations import Tuned, Tuning, parted
from tessera.marks import LINES
from tessera.schedule import Schedule
from tessera.tensor import Tensor
from tessera.types import Type

if TYPE_CHECKING:
    from tessera.kernel.specialize import Specialized


@dataclass(frozen=True)
class Options:
    """What @kernel was given."""

    tile_shape: tuple[int, ...] = ()
    shared_memory: int = 0
    num_warps: int = 4
    autotune: bool = False
    autotune_configs: tuple[Mapping[str, Any], ...] = ()
    target: str | None = None
    schedule: Schedule | None = None
    tuning: Tuning | None = None


class Kernel:
    """A kernel: `k[grid](args…)` and `k[grid, group](args…)` launch it, `k(args…)` with a launch of its own choice.

    A grid is an int or a tuple of ints, or a function of the constants that gives one; beside a group
    size it is written as a tuple: `k[(8,), 128]`. Arrays are written in place.
    """

    def __init__(self, function: FunctionType, options: Options) -> None:
        functools.update_wrapper(self, function)  # type: ignore[arg-type]
        self.kernel_function = function
        self.options = options
        self.parameters = parameters(function)
        self.hooks = Hooks()
        self._cache: dict[Any, Specialized] = {}
        self._configured: dict[Any, Kernel] = {}

    def __getitem__(self, item: Any) -> Launch:
        grid, group = item if isinstance(item, tuple) and len(item) == 2 and _is_grid(item[0]) else (item, None)
        return Launch(self, grid, group)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return Launch(self, None, None)(*args, **named)

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> Arguments:
        """A call's arguments, sorted; the schedule, or the first autotune configuration, gives constants left out."""
        free = list(self.parameters.signature.parameters)[len(args) :]
        configs = self.options.autotune_configs
        missing = {**(configs[0] if configs else {}), **self._scheduled()}
        return self.parameters.bind(tuple(args), named, {k: v for k, v in missing.items() if k in free})

    def _scheduled(self) -> dict[str, Any]:
        schedule = self.options.schedule
        return schedule.constants(self.parameters.constants) if schedule else {}

    @property
    def schedule(self) -> Schedule:
        """The schedule this kernel was given; an empty one where it was given none."""
        return self.options.schedule or Schedule()

    def with_schedule(self, schedule: Schedule) -> Kernel:
        """A new kernel with the fields of a schedule bound to the constants that mean them (tessera/schedule.py).

        Constants that a call gives go before those of the schedule. `warps` is the default group of a
        kernel that asks for one; where no constant takes the block sizes they become the `tile_shape`.

        Raises:
            ArgumentError: this is no Schedule.
        """
        return self.like(_with_schedule(self.options, schedule, self.parameters.constants))

    def like(self, options: Options) -> Kernel:
        """This kernel with other options, and the same hooks."""
        made = Kernel(self.kernel_function, options)
        made.hooks = self.hooks
        return made

    def configured(self, config: Mapping[str, Any]) -> Kernel:
        """This kernel with the constants and schedule fields of a configuration, and no tuning of its own."""
        key = tuple((k, _hashable(v)) for k, v in sorted(config.items()))
        if key not in self._configured:
            constants, fields = parted(config, self.parameters.constants)
            first = {**(self.options.autotune_configs or ({},))[0], **constants}
            made = self.like(replace(self.options, tuning=None, autotune_configs=(first,)))
            self._configured[key] = made.with_schedule(self.schedule.derive(**fields)) if fields else made
        return self._configured[key]

    def before(self, hook: Hook) -> Hook:
        """Call `hook(started)` before each launch (see tessera/kernel/hooks.py); a decorator."""
        self.hooks.before.append(hook)
        return hook

    def after(self, hook: Hook) -> Hook:
        """Call `hook(started)` after each launch that came to its end; a decorator."""
        self.hooks.after.append(hook)
        return hook

    def plan(self, found: Arguments, grid: Any, group: int | None) -> tuple[tuple[int, ...], int]:
        """The launch: as asked for, or the default (see defaults.py)."""
        if callable(grid):
            grid = grid({**self.parameters.sizes(found.types), **found.constants})
        if grid is not None:
            return _grid(grid), _size("group", 1 if group is None else group, 1)
        from tessera.kernel import defaults
        from tessera.kernel.source import read

        body = read(self.kernel_function).body
        chosen, size = defaults.launch(body, found.types, self.options.tile_shape, self.options.num_warps)
        return chosen, _size("group", size if group is None else group, 1)

    def specialize(
        self, arg_types: Mapping[str, Type], constants: Mapping[str, Any], grid: tuple[int, ...] = (1,), group: int = 1
    ) -> Module:
        """The Tile module for these argument types and this launch, compiled once."""
        named = tuple((k, _hashable(v)) for k, v in constants.items())
        key = (tuple(arg_types.items()), named, grid, group, LINES.get())
        found = self._cache.get(key)
        if found is None or not found.unchanged():
            from tessera.kernel.specialize import Request, specialize  # the front end: not for who only imports kernels

            options = self.options
            hints = (self.schedule.stages, self.schedule.cluster)
            request = Request(arg_types, constants, grid, group, options.tile_shape, options.shared_memory, *hints)
            found = self._cache[key] = specialize(self.kernel_function, self.parameters, request)
        return found.module

    def __repr__(self) -> str:
        return f"<kernel {self.kernel_function.__name__}>"


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid and group chosen (None: by default), waiting for arguments."""

    kernel: Kernel
    grid: Any = None
    group: int | None = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.kernel.options.tuning is not None:
            from tessera.kernel.tuning import tuner

            return tuner.chosen(self, self.tune(*args, **named).config)(*args, **named)
        found = self.kernel.bind(args, named)
        module = self._module(found)
        stream = ordered(module, lambda: dict(zip(found.types, found.arrays, strict=True)))
        if stream is not None:
            return stream.queue(lambda: self._run(module, found))
        return self._run(module, found)

    def _run(self, module: Module, found: Arguments) -> Any:
        started = self._started(module, found)
        for hook in self.kernel.hooks.before:
            hook(started)
        outputs = launch.run(module, found.arrays, self.kernel.options.target)
        for hook in self.kernel.hooks.after:
            hook(started)
        results = [Tensor(a) if found.tensors else a for a in outputs]
        return tuple(results) if len(results) > 1 else results[0] if results else None

    def tune(self, *args: Any, **named: Any) -> Tuned:
        """The best configuration of an autotuned kernel for these arguments: measured on copies, or as remembered.

        Raises:
            ArgumentError: the kernel is not autotuned, or no configuration can run.
        """
        if self.kernel.options.tuning is None:
            raise ArgumentError(f"{self.kernel!r} is not autotuned", location=here(), expected="@kernel.autotune(...)")
        from tessera.kernel.tuning import tuner

        return tuner.tune(self, args, named)

    def _started(self, module: Module, found: Arguments) -> Any:
        if not self.kernel.hooks.before and not self.kernel.hooks.after:
            return None
        function = module.functions[1]
        target = self.kernel.options.target or default_device()
        arrays = dict(zip(found.types, found.arrays, strict=True))
        grid, group = function.attrs["grid"], function.attrs["group"]
        return Started(function.name, grid, group, target, found.constants, arrays)

    def module(self, *args: Any, **named: Any) -> Module:
        """The Tile module that a call with these arguments runs; of an autotuned kernel, in its first configuration."""
        return self._module(self.kernel.bind(args, named))

    def _module(self, found: Arguments) -> Module:
        grid, group = self.kernel.plan(found, self.grid, self.group)
        return self.kernel.specialize(found.types, found.constants, grid, group)


def _with_schedule(options: Options, schedule: Any, constants: frozenset[str]) -> Options:
    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"{schedule!r} is not a schedule", location=here(), expected="ts.Schedule(...)",
            suggestion="ts.Schedule(block=(64, 64), warps=4)",
        )  # fmt: skip
    blocks = {k: v for k, v in schedule.given.items() if k.startswith(("block", "tile"))}
    shape = options.tile_shape if Schedule(**blocks).constants(constants) else schedule.block or options.tile_shape
    return replace(options, schedule=schedule, tile_shape=shape, num_warps=schedule.warps or options.num_warps)


def _is_grid(item: Any) -> bool:
    return isinstance(item, (tuple, list)) or callable(item)


def _grid(grid: Any) -> tuple[int, ...]:
    listed = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    return tuple(_size("grid", n) for n in listed) or (1,)


def _size(what: str, number: Any, least: int = 0) -> int:
    if not isinstance(number, (int, np.integer)) or isinstance(number, bool) or number < least:
        raise ArgumentError(
            f"{number!r} is not a {what} size", location=here(), expected=f"an int of at least {least}",
            suggestion="beside a group size the grid is a tuple: kernel[(8,), 128]",
        )  # fmt: skip
    return int(number)


def _hashable(value: Any) -> Any:
    """A constant as part of a key: by value where it has one, and 1, 1.0 and True apart."""
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(_hashable(v) for v in value))
    if isinstance(value, dict):
        return (dict, tuple((k, _hashable(v)) for k, v in value.items()))
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return (type(value), value)


class _Same:
    """A value that is equal only to itself; kept, so that no other gets its id."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
