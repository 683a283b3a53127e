"""A program: an entry point with its arguments, ready to run at any level or on any target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera import driver
from tessera.device import INTERP
from tessera.errors import ArgumentError
from tessera.interp import bound
from tessera.interp import tile as tile_interpreter
from tessera.ir.core import Function, Module
from tessera.kernel import Kernel
from tessera.numerics.bounded import Bounded
from tessera.tracing import Jit, _array


@dataclass(frozen=True)
class Program:
    """A lowered entry point and its arrays.

    `names` and `arrays` are the parameters in order (captured arrays last); `written` are the
    places of those that a kernel writes, which are then its results.
    """

    name: str
    levels: Mapping[str, Module]
    names: tuple[str, ...]
    arrays: tuple[np.ndarray, ...]
    written: tuple[int, ...] = ()

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


def prepare(entry: Any, arguments: Any, target: str = INTERP, grid: Any = None, group: int | None = None) -> Program:
    """Trace or specialise an entry point for these arguments and lower it for a target."""
    args, named = _split(arguments)
    if isinstance(entry, Kernel):
        grid = grid(*args, **named) if callable(grid) else grid
        return _kernel_program(entry, args, named, grid, group)
    assert isinstance(entry, Jit)
    call = entry.bind(tuple(args), named)
    traced = entry.trace(*args, **named)
    arrays = (*(_array(leaf) for leaf in call.leaves), *traced.captures)
    names = tuple(p.hint for p in traced.function.params)
    return Program(traced.function.name, _levels(traced.function, target), names, arrays)


def _kernel_program(entry: Kernel, args: Sequence[Any], named: dict[str, Any], grid: Any, group: int | None) -> Program:
    found = entry.bind(args, named)
    module = entry.specialize(found.types, found.constants, *entry.plan(found, grid, group))
    return Program(
        entry.kernel_function.__name__, {"tile": module}, tuple(found.types), tuple(found.arrays), _written(module)
    )


def _written(module: Module) -> tuple[int, ...]:
    """The places of the parameters that a kernel writes, its outputs apart."""
    kernel = module.functions[1]
    count = len(kernel.params) - int(module.main.attrs.get("outputs", 0))
    targets = {n.args[0] for n in kernel.body.walk() if n.op.effects & {"write"}}
    return tuple(i for i, p in enumerate(kernel.params[:count]) if p in targets)


def _levels(function: Function, target: str) -> dict[str, Module]:
    return driver.lower(function, target)


def _split(arguments: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    return ((), dict(arguments)) if isinstance(arguments, Mapping) else (tuple(arguments), {})
