"""Cases of the suite, and the outcomes of running them."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from tessera.core.errors import ArgumentError, TesseraError

# Each area is a module with `cases() -> Iterator[Case]`; its folder names level and area.
AREAS = (
    "graph.elementwise", "graph.functions", "graph.reduce", "graph.shape", "graph.scatter", "graph.linalg",
    "graph.composites", "graph.networks", "graph.flow", "graph.launches", "graph.gradients", "graph.collectives",
    "graph.numerics", "graph.sizes", "graph.found", "graph.errors", "tile.blocks", "tile.products", "tile.control",
    "tile.memory", "tile.groups", "tile.cooperation", "tile.scans", "tile.atomics", "tile.random", "tile.errors",
    "tile.debug", "tile.stdlib", "tile.language", "tile.spec", "tile.tutorials", "tile.sizes", "tile.found",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A program with inputs: it must agree with its bound on every engine, or be refused.

    `entry()` returns (jit function or kernel, arguments). `rejects` is the error that it must raise instead, when it is
    made or by a run on every engine; its text must contain each of `says`. `exact` requires equality with the
    reference, not only agreement within the bound.
    `alike` requires the bits of the interpreter of the highest level, as for stochastic rounding. With `debug` the Tile
    interpreter also runs it in debug mode, which must raise the error, or report nothing. `lines` are the lines that it
    prints. `dynamic` names symbolic sizes, as in `tessera.build`. With `unknown` an
    element without a finite bound may be anything, also NaN; else it must be finite where the reference is. With a
    `mesh` each of its ranks runs the program on its slice of each argument, and the stacked results must be those of
    `whole`, a jit function of the whole arguments.
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
    unknown: bool = False
    mesh: Any = None
    whole: Any = None


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


# Areas of thousands of cases that follow from the definitions of the ops; `all_cases` leaves them out.
SWEEPS = ("graph.sweep",)
# Profiles: the cases whose names match one of these patterns (fnmatch), and none of those after "not".
PROFILES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "core": (
        ("graph/*",),
        ("*gradient*", "graph/collectives/*", "graph/numerics/*", "*fp8*", "*fp6*", "*fp4*", "*int4*"),
    ),
    "kernels": (("tile/*",), ()),
    "tensor-cores": (("*product*", "*matmul*", "*dot*", "*gemm*", "graph/linalg/*"), ()),
    "low-precision": (("graph/numerics/*", "*f16*", "*bf16*", "*fp8*", "*fp6*", "*fp4*", "*int4*", "*int8*"), ()),
    "autodiff": (("graph/gradients/*", "graph/sweep/gradient/*"), ()),
    "collectives": (("graph/collectives/*",), ()),
    "sweep": (("graph/sweep/*",), ()),
    "all": (("*",), ()),
}


def find_profile(name: str) -> list[Case]:
    """The cases of a profile, those of the sweeps included.

    Raises:
        ArgumentError: there is no such profile.
    """
    if name not in PROFILES:
        raise ArgumentError(f"{name!r} is not a profile", expected=", ".join(PROFILES))
    return [c for area in (*AREAS, *SWEEPS) for c in read_area(area) if in_profile(c, name)]


def in_profile(case: Case, name: str) -> bool:
    """Whether a profile selects a case."""
    wanted, unwanted = PROFILES[name]
    return _matches(case.name, wanted) and not _matches(case.name, unwanted)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def read_area(area: str) -> Iterator[Case]:
    """The cases of one area; those of all but the sweeps are made once in a process."""
    yield from _make_area(area) if area in AREAS else _iterate_area(area)


@cache
def _make_area(area: str) -> tuple[Case, ...]:
    return tuple(_iterate_area(area))


def _iterate_area(area: str) -> Iterator[Case]:
    yield from importlib.import_module(f"conformance.{area}.cases").cases()


def all_cases() -> Iterator[Case]:
    """Every case but those of sweeps, in a fixed order."""
    for area in AREAS:
        yield from read_area(area)


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
