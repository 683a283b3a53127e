"""Pipeline extensions: passes that users add to the lowering, by name, and which of them a traced function has.

A function under trace records the names of its extensions as attributes (`passes`, `fusion`), so that every tool that
lowers the function again (`inspect`, `bisect`, `build`) finds the same passes. Extensions of the Graph level run first,
in order; those of the Schedule level run after the pass `schedule`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from tessera.core.errors import UnknownNameError
from tessera.ir.core import Attrs, Function, Module
from tessera.lower.lowering_plan import LoweringPlan

GRAPH, SCHEDULE = "graph", "schedule"
PASSES, FUSION = "passes", "fusion"  # attributes of a Graph function


@dataclass(frozen=True, eq=False)
class PipelineExtension:
    """A pass of a user: its name in the pipeline, the level whose modules it takes, and the function itself."""

    name: str
    level: str
    run: Callable[[Module, LoweringPlan], Module]
    source: Any = None  # what it was made from
    serial: int = field(default_factory=itertools.count(1).__next__)  # of no other extension, as an id may be


# The extensions by name, and the names of those that every program has.
EXTENSIONS: dict[str, PipelineExtension] = {}
INSTALLED: list[str] = []
# The names of the extensions that programs traced in this context have besides, and their fusion.
SCOPED: ContextVar[tuple[str, ...]] = ContextVar("scoped passes", default=())
HIDDEN: ContextVar[frozenset[str]] = ContextVar("hidden passes", default=frozenset())  # installed, but not here
SCOPED_FUSION: ContextVar[Attrs | None] = ContextVar("fusion", default=None)
# The rules of `ts.fusion.pattern` by name: rule(producer, consumer) says whether two ops may share a kernel.
FUSION_RULES: dict[str, Callable[[Any, Any], bool]] = {}
# What notes the compiled programs that run in this context (`ts.profile`), or None: its method
# `note(function, device, run, arrays)` runs the program.
RUN_OBSERVER: ContextVar[Any] = ContextVar("run observer", default=None)
# Whether a pass compares the program before and after it on arrays of its own.
VALUES_CHECKED: ContextVar[bool | None] = ContextVar("values checked", default=None)


def register_extension(extension: PipelineExtension) -> PipelineExtension:
    """Register an extension; another one of its name is replaced, as where a notebook's cell is run again."""
    EXTENSIONS[extension.name] = extension
    return extension


def list_active_names() -> tuple[str, ...]:
    """The names of the extensions of a program that is traced now."""
    hidden = HIDDEN.get()
    installed = [n for n in INSTALLED if n not in hidden]
    return (*installed, *(n for n in SCOPED.get() if n not in installed))


def make_extension_key() -> Hashable:
    """A cache key of the extensions of a program that is traced now; None where there are none."""
    names, fusion, observed = list_active_names(), SCOPED_FUSION.get(), RUN_OBSERVER.get() is not None
    if not names and fusion is None and not observed:
        return None
    return tuple((n, EXTENSIONS[n].serial) for n in names), fusion, observed


def make_program_attributes(passes: Sequence[str] = (), fusion: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The attributes of a function that is traced now; `passes` and `fusion` are its own, besides the context's."""
    names = tuple(dict.fromkeys((*list_active_names(), *passes)))
    chosen = fusion or SCOPED_FUSION.get()
    return {**({PASSES: names} if names else {}), **({FUSION: Attrs(chosen)} if chosen else {})}


@contextmanager
def use_extensions(names: Sequence[str] = (), fusion: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Programs traced in this context have these extensions, too."""
    token = SCOPED.set(tuple(dict.fromkeys((*SCOPED.get(), *names))))
    other = SCOPED_FUSION.set(Attrs(fusion) if fusion else SCOPED_FUSION.get())
    try:
        yield
    finally:
        SCOPED.reset(token)
        SCOPED_FUSION.reset(other)


@contextmanager
def check_values(wanted: bool) -> Iterator[None]:
    """Turn the comparison of values after each pass of a user on or off."""
    token = VALUES_CHECKED.set(wanted)
    try:
        yield
    finally:
        VALUES_CHECKED.reset(token)


def find_extensions(function: Function, level: str) -> list[PipelineExtension]:
    """The extensions of a traced function at a level, in order.

    Raises:
        UnknownNameError: this process has no pass of that name.
    """
    names = function.attrs.get(PASSES, ())
    unknown = [n for n in names if n not in EXTENSIONS]
    if unknown:
        raise UnknownNameError(
            f"{function.name} was traced with the compiler pass {unknown[0]}, which is not here",
            location=function.loc, expected=", ".join(EXTENSIONS) or "none",
            suggestion="import the module that defines it",
        )  # fmt: skip
    return [e for n in names if (e := EXTENSIONS[n]).level == level]
