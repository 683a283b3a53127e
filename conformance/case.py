"""A case of the suite, and what came of running it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import TesseraError

# Each area is a module with `cases() -> Iterator[Case]`; its folder says level and area.
AREAS = (
    "graph.elementwise", "graph.functions", "graph.reduce", "graph.shape", "graph.linalg", "graph.composites",
    "graph.flow", "graph.gradients", "graph.numerics",
    "graph.errors", "tile.blocks", "tile.products", "tile.control", "tile.memory", "tile.groups", "tile.cooperation",
    "tile.scans", "tile.atomics", "tile.random", "tile.errors", "tile.debug", "tile.stdlib",
    "tile.language", "tile.spec", "tile.tutorials",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A program with inputs: it must agree with its bound on every engine, or be refused.

    `entry()` gives (jit function or kernel, arguments); `rejects` is the error that must come instead,
    whose text must hold each of `says`. `exact` asks for equality, not agreement within the bound; `alike` for the
    bits that the interpreter of the highest level gives, which no bound knows where rounding is by chance.
    With `debug` the Tile interpreter runs it in debug mode too: there the error must come, or no finding. `lines` are
    those that it prints.
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


@dataclass(frozen=True)
class Outcome:
    """What a case came to on one engine; `share` is the worst error as a share of the bound, `useless` a
    bound so wide that agreement says nothing."""

    case: str
    engine: str
    status: str  # "pass", "fail" or "unsupported"
    share: float = 0.0
    detail: str = ""
    useless: bool = False


def all_cases() -> Iterator[Case]:
    """Every case, in a fixed order."""
    for area in AREAS:
        yield from importlib.import_module(f"conformance.{area}.cases").cases()
