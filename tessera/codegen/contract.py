"""The contract between compiler and code generator, and the registry of generators.

A generator is an object of the entry point group `tessera.codegen` that emits an artifact from a Tile module.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.core.errors import ArgumentError, DeviceUnavailable, UnknownNameError, user_location
from tessera.core.types import DType
from tessera.ir.core import Module
from tessera.ir.rewrite import VERIFY_VARIABLE
from tessera.ir.verify import verify

# The contract between the compiler and a code generator.


@dataclass(frozen=True)
class Capabilities:
    """The limits of a target, by which the lowering chooses tiles.

    `shared_bytes` limits the shared memory of a group, `block_bytes` the blocks of one tile; None: no limit.
    `meeting` is the number of groups that run at once, so that a grid barrier works; 0: none.
    `lockstep` is the number of tiles of a group that run in lockstep (a warp); a group should be a multiple of it.
    `plan` holds the tile sizes that suit the target (a `tessera.lower.lowering_plan.LoweringPlan`), or None.
    """

    vector_bytes: int
    dtypes: tuple[DType, ...]
    max_grid_rank: int = 3
    max_group: int = 1024
    shared_bytes: int | None = None
    block_bytes: int | None = None
    meeting: int = 0
    lockstep: int = 1
    plan: Any = None


@dataclass(frozen=True)
class CompilerPass:
    """A named step of a generator's pipeline: `run` takes a module and gives a new one, which verifies and prints.

    The name is the field's term, as in "software pipelining".
    """

    name: str
    run: Callable[[Module], Module]


def run_passes(passes: Sequence[CompilerPass], module: Module) -> Module:
    """The module after all of these passes, in order; each is verified if the variable TESSERA_VERIFY is set."""
    for each in passes:
        module = each.run(module)
        if os.environ.get(VERIFY_VARIABLE):
            verify(module)
    return module


class Runtime(Protocol):
    """An artifact that is loaded and ready to run."""

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Run the program; returns its outputs. Arrays that it writes in place are changed."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A code generator, found through the entry point group `tessera.codegen`.

    `runtime` and `interpreter` are optional (`get_capable_backend`), as are `passes` (`PassPipeline`).
    """

    name: str

    @property
    def capabilities(self) -> Capabilities:
        """The limits of the target."""
        ...

    def emit(self, module: Module, options: Mapping[str, Any]) -> Artifact:
        """The target text and launch plan of a Tile module.

        Raises:
            UnsupportedOpError: an op has neither a row nor a lowering; it names the op, the target and the line.
        """
        ...

    def runtime(self, artifact: Artifact) -> Runtime:
        """Load the artifact for the device."""
        ...

    def interpreter(self, artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
        """A function that runs the artifact's text in an emulator, without the device."""
        ...


@runtime_checkable
class PassPipeline(Protocol):
    """A generator that names its passes: `emit` runs them in order, then writes the text of what the last one gave.

    `tessera inspect --pass-by-pass` prints the module after each of them; `tessera bisect` verifies it and runs it in
    the Tile interpreter. A module after the last pass may be given to `emit` itself.
    """

    def passes(self, module: Module, options: Mapping[str, Any]) -> Sequence[CompilerPass]:
        """The passes for a Tile module and these options, in order; none for a module that has been through them."""
        ...


# The registry of generators.


ENTRY_POINT_GROUP = "tessera.codegen"
# As in setup.cfg, for a checkout that is not installed; an installed entry point of the same name takes precedence.
BUILT_IN = (
    EntryPoint("llvm", "tessera.codegen.llvm:BACKEND", ENTRY_POINT_GROUP),
    EntryPoint("ptx", "tessera.codegen.ptx:BACKEND", ENTRY_POINT_GROUP),
    EntryPoint("csl", "tessera.codegen.csl:BACKEND", ENTRY_POINT_GROUP),
)


def list_backends() -> dict[str, EntryPoint]:
    """All generators by name, none of them imported."""
    return {point.name: point for point in (*BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP))}


@cache
def get_backend(name: str) -> Backend:
    """The generator of this name; what follows a colon configures it, as in "csl:4x4".

    Raises:
        UnknownNameError: no generator has this name; the message lists the names.
        DeviceUnavailable: its package cannot be imported.
        ArgumentError: it takes no configuration, or not this one.
    """
    name, colon, options = name.partition(":")
    found = list_backends().get(name)
    if found is None:
        close = difflib.get_close_matches(name, list_backends(), 1)
        raise UnknownNameError(
            f'"{name}" is not a code generator', location=user_location(), expected=", ".join(sorted(list_backends())),
            suggestion=f"did you mean {close[0]}?" if close else None,
        )  # fmt: skip
    generator = _load_backend(found)
    if not colon:
        return generator
    if not hasattr(generator, "configured"):
        raise ArgumentError(f"the target {name} takes nothing after a colon", received=options)
    return generator.configured(options)


def _load_backend(point: EntryPoint) -> Backend:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise DeviceUnavailable(
            f"the generator {point.name} does not load: {error}", expected=point.value,
            suggestion="install the package that has it again",
        ) from error  # fmt: skip


def list_target_passes(name: str, module: Module, options: Mapping[str, Any]) -> Sequence[CompilerPass]:
    """The passes of a generator between a Tile module and its text; none where it does not tell them apart."""
    generator = get_backend(name)
    return generator.passes(module, options) if isinstance(generator, PassPipeline) else ()


def get_capable_backend(name: str, method: str) -> Backend:
    """The generator of this name, which has the optional `method`: "runtime" or "interpreter".

    Raises:
        ArgumentError: it does not.
    """
    generator = get_backend(name)
    if not hasattr(generator, method):
        raise ArgumentError(
            f"the target {name} has no {method} for its text", expected=f"a generator with `{method}`",
            suggestion="run it at another level, or on another target",
        )  # fmt: skip
    return generator
