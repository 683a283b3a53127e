"""Random program: Python source text with its inputs, as fuzzing makes, runs and writes it."""

from __future__ import annotations

import importlib
import itertools
import linecache
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.inputs import edge_values
from tessera.frontend.jit.tracing import Jit

# What the source of programs calls `ts`: the whole package, which no module of it may import.
TESSERA: Any = importlib.import_module("tessera")
_FILES = itertools.count()
FOLDER = "<fuzz"  # the file names of programs in error messages


@dataclass(frozen=True)
class Input:
    """An argument: a kind of values with a seed (`conformance.inputs.edge_values`), or zeros, which a kernel writes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str = "ramp"
    seed: int = 0

    def make(self) -> np.ndarray:
        """The array, the same each time."""
        return edge_values(self.kind, self.seed, self.shape, self.dtype)

    @property
    def text(self) -> str:
        """The array as Python source."""
        if self.kind == "zeros" and self.seed == 0:
            return f"np.zeros({self.shape}, as_dtype({self.dtype!r}).numpy)"
        return f"edge_values({self.kind!r}, {self.seed}, {self.shape}, {self.dtype!r})"


@dataclass(frozen=True)
class PlantedFault:
    """A change of a kernel's text that makes it wrong: debug mode must report it."""

    what: str
    old: str
    new: str


@dataclass(frozen=True)
class RandomProgram:
    """The source of a function named `program`, with its inputs; a kernel has a grid, a group and constants."""

    source: str
    inputs: tuple[Input, ...]
    grid: tuple[int, ...] | None = None
    group: int | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...] = ()  # other grids and constants: the same results
    faults: tuple[PlantedFault, ...] = ()

    def break_by(self, fault: PlantedFault) -> RandomProgram:
        """The kernel with a fault at the first place where it fits."""
        assert fault.old in self.source, fault
        return replace(self, source=self.source.replace(fault.old, fault.new, 1), faults=())

    @property
    def is_kernel(self) -> bool:
        """Whether the program is a kernel, not a function."""
        return self.grid is not None

    def load(self) -> Any:
        """Execute the source: the function under `ts.jit`, or the kernel."""
        scope = execute_source(self.source)
        return scope["program"] if self.is_kernel else Jit(scope["program"])

    def arguments(self) -> dict[str, Any]:
        """Fresh arguments by name."""
        return {**{i.name: i.make() for i in self.inputs}, **self.constants}

    def case(self, name: str) -> Case:
        """The program as a case of the conformance suite."""
        return Case(
            name,
            lambda: (self.load(), self.arguments()),
            grid=self.grid,
            group=self.group,
            debug=self.is_kernel,
            unknown=True,
        )


def execute_source(source: str, file: str = "") -> dict[str, Any]:
    """Execute the source of a program as a file that tracebacks show: the names that it defines."""
    name = file or f"{FOLDER}-{next(_FILES)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"ts": TESSERA, "tile": TESSERA.tile, "np": np, "__name__": "fuzz"}
    exec(compile(source, name, "exec"), scope)
    return scope


def forget_sources() -> None:
    """Free the sources of the programs so far."""
    for name in [n for n in linecache.cache if n.startswith(FOLDER)]:
        del linecache.cache[name]
