"""Cases of the suite, and the outcomes of running them."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.core.errors import ArgumentError, TesseraError

# Each area is a module with `cases() -> Iterator[Case]`; its folder names level and area.
AREAS = (
    "graph.elementwise", "graph.functions", "graph.reduce", "graph.shape", "graph.linalg", "graph.composites",
    "graph.networks", "graph.flow", "graph.launches", "graph.gradients", "graph.numerics", "graph.sizes",
    "graph.found", "graph.errors", "tile.blocks", "tile.products", "tile.control", "tile.memory", "tile.groups",
    "tile.cooperation", "tile.scans", "tile.atomics", "tile.random", "tile.errors", "tile.debug", "tile.stdlib",
    "tile.language", "tile.spec", "tile.tutorials", "tile.found",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A program with inputs: it must agree with its bound on every engine, or be refused.

    `entry()` returns (jit function or kernel, arguments). `rejects` is the error that it must raise instead, whose
    text must contain each of `says`. `exact` requires equality with the reference, not only agreement within the bound.
    `alike` requires the bits of the interpreter of the highest level, as for stochastic rounding. With `debug` the Tile
    interpreter also runs it in debug mode, which must raise the error, or report nothing. `lines` are the lines that it
    prints. `dynamic` names symbolic sizes, as in `tessera.build`.
    """

    name: str
    entry: Callable[[], tuple[Any, Any]]
    grid: Any = None
    group: int | None = None
    exact: bool = False
    alike: bool = False
    rejects: type[TesseraError] | None = None
    says: tuple[str, ...] = ()
    debug: bool = False
    lines: tuple[str, ...] = ()
    dynamic: Any = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case on one engine; `share` is the largest error relative to the bound, `useless` marks a bound
    that is too wide to check anything. `nans`, `infinities` and `unbounded` count the elements of the results that are
    not finite, and those without a finite bound."""

    case: str
    engine: str
    status: str  # "pass", "fail" or "unsupported"
    share: float = 0.0
    detail: str = ""
    useless: bool = False
    missing: tuple[str, ...] = ()  # the ops of an unsupported case for which the engine's target has no row
    nans: int = 0
    infinities: int = 0
    unbounded: int = 0


def all_cases() -> Iterator[Case]:
    """Every case, in a fixed order."""
    for area in AREAS:
        yield from importlib.import_module(f"conformance.{area}.cases").cases()


def read_cases(path: str) -> list[Case]:
    """The cases of a Python file: what its function `cases` yields.

    Raises:
        ArgumentError: the file is missing, fails, or has no such function.
    """
    if not Path(path).is_file():
        raise ArgumentError(f"there is no file {path}", suggestion="tessera fuzz writes files of cases")
    scope = runpy.run_path(path)
    if not callable(scope.get("cases")):
        raise ArgumentError(f"{path} has no cases", expected="a function cases() that yields conformance.case.Case")
    return list(scope["cases"]())
