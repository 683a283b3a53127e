"""A program: an entry point with its arguments, ready to run at any level or on any target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from tessera import driver
from tessera.device import INTERP
from tessera.errors import ArgumentError, here
from tessera.interp import bound
from tessera.interp import tile as tile_interpreter
from tessera.ir.core import Module
from tessera.kernel import Kernel
from tessera.kernel.kernel import Launch
from tessera.kernel.launch import written
from tessera.kernel.tuning.configurations import Tuned
from tessera.numerics.bounded import Bounded
from tessera.tracing import Jit, _array
from tessera.tuned import of_constants, tuned


@dataclass(frozen=True)
class Program:
    """A lowered entry point and its arrays.

    `names` and `arrays` are the parameters in order (captured arrays last); `written` are the
    places of those that a kernel writes, which are then its results. `tuned` is how an autotuned kernel's configuration
    was found; None for any other entry.
    """

    name: str
    levels: Mapping[str, Module]
    names: tuple[str, ...]
    arrays: tuple[np.ndarray, ...]
    written: tuple[int, ...] = ()
    tuned: Tuned | None = None

    @property
    def top(self) -> str:
        """The highest level this program has: "graph", or "tile" for a kernel."""
        return next(iter(self.levels))

    def run(self, level: str, target: str = INTERP) -> list[np.ndarray]:
        """The results at a level (by its interpreter) or, with level "device", by a target's own runtime."""
        arrays = [a.copy() if i in self.written else a for i, a in enumerate(self.arrays)]
        levels = self._levels_for(target)
        if level == "device":
            results = driver.program(levels["tile"], target)(arrays)
        elif level != "target" and level not in levels:
            raise ArgumentError(
                f"{self.name} has no {level} level", expected=", ".join([*levels, "target"]), received=level,
                suggestion="a kernel begins at the Tile level, and a program on a mesh goes there from the graph",
            )  # fmt: skip
        else:
            results = driver.run_level(dict(levels), level, arrays, target)
        return [*results, *(arrays[i] for i in self.written)]

    def _levels_for(self, target: str) -> Mapping[str, Module]:
        """The levels as a target wants them: a mesh of elements has a lowering of its own."""
        wanted = None if self.top != "graph" or target == INTERP else driver.plan_for(target).mesh
        held = self.levels["tile"].functions[1:2]
        if wanted is None or (held and held[0].attrs.get("mesh") == wanted):
            return self.levels
        return driver.lower(self.levels["graph"].main, target)

    def bounds(self) -> list[Bounded]:
        """The results with how far any legal evaluation may lie from them (design 5)."""
        if self.top == "graph":
            return bound.run(self.levels["graph"].main, list(self.arrays))
        return tile_interpreter.bounds(self.levels["tile"], list(self.arrays), self.written)


def prepare(
    entry: Any, arguments: Any, target: str = INTERP, grid: Any = None, group: int | None = None,
    tune: bool = False, options: Mapping[str, Any] = MappingProxyType({}), lower: bool = True,
) -> Program:  # fmt: skip
    """Trace or specialise an entry point for these arguments and lower it for a target.

    Without `lower` it stays at its first level.

    An autotuned kernel is tuned for the target if `tune` asks for it, or read from the cache of what was found before
    (tessera/tuned.py); else it is taken in its first configuration. `options` are the generator's, where one will emit.
    """
    args, named = _split(arguments)
    if isinstance(entry, Kernel):
        grid = of_constants(grid, args, named)
        found = tuned(Launch(entry, grid, group), args, named, target, options) if tune else None
        return _kernel_program(
            entry if found is None else entry.configured(found.config), args, named, grid, group, found
        )
    if not isinstance(entry, Jit):
        raise ArgumentError(
            f"{getattr(entry, '__name__', type(entry).__name__)} is no program", location=here(),
            expected="a function under @ts.jit or @ts.kernel", suggestion="wrap it: ts.jit(function)",
        )  # fmt: skip
    call = entry.bind(tuple(args), named)
    traced = entry.trace(*args, **named)
    arrays = (*(_array(leaf) for leaf in call.leaves), *traced.captures)
    names = tuple(p.hint for p in traced.function.params)
    levels = driver.lower(traced.function, target) if lower else {"graph": Module("graph", (traced.function,))}
    return Program(traced.function.name, levels, names, arrays)


def _kernel_program(
    entry: Kernel, args: Sequence[Any], named: dict[str, Any], grid: Any, group: int | None, how: Tuned | None
) -> Program:
    found = entry.bind(args, named)
    module = entry.specialize(found.types, found.constants, *entry.plan(found, grid, group))
    return Program(
        entry.kernel_function.__name__, {"tile": module}, tuple(found.types), tuple(found.arrays), written(module), how
    )


def _split(arguments: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    return ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
