"""The code generators there are, by name."""

from __future__ import annotations

import difflib
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from tessera.codegen.backend import Backend
from tessera.errors import ArgumentError, DeviceUnavailable, UnknownNameError, here

GROUP = "tessera.codegen"
# As in setup.cfg, for a checkout that is not installed; an installed entry point of the same name wins.
BUILT_IN = (
    EntryPoint("llvm", "tessera.codegen.llvm:BACKEND", GROUP),
    EntryPoint("ptx", "tessera.codegen.ptx:BACKEND", GROUP),
    EntryPoint("csl", "tessera.codegen.csl:BACKEND", GROUP),
)


def backends() -> dict[str, EntryPoint]:
    """Every generator there is; none is imported."""
    return {point.name: point for point in (*BUILT_IN, *entry_points(group=GROUP))}


@cache
def backend(name: str) -> Backend:
    """The generator of this name; what follows a colon configures it, as in "csl:4x4".

    Raises:
        UnknownNameError: there is none; it lists those there are.
        DeviceUnavailable: its package cannot be imported.
        ArgumentError: it cannot be configured, or not so.
    """
    name, colon, options = name.partition(":")
    found = backends().get(name)
    if found is None:
        close = difflib.get_close_matches(name, backends(), 1)
        raise UnknownNameError(
            f'"{name}" is not a code generator', location=here(), expected=", ".join(sorted(backends())),
            suggestion=f"did you mean {close[0]}?" if close else None,
        )  # fmt: skip
    generator = _loaded(found)
    if not colon:
        return generator
    if not hasattr(generator, "configured"):
        raise ArgumentError(f"the target {name} takes nothing after a colon", received=options)
    return generator.configured(options)


def _loaded(point: EntryPoint) -> Backend:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise DeviceUnavailable(
            f"the generator {point.name} does not load: {error}", expected=point.value,
            suggestion="install the package that has it again",
        ) from error  # fmt: skip


def able(name: str, method: str) -> Backend:
    """The generator of this name, which has the optional `method`: "runtime" or "interpreter".

    Raises:
        ArgumentError: it does not.
    """
    generator = backend(name)
    if not hasattr(generator, method):
        raise ArgumentError(
            f"the target {name} has no {method} for its text", expected=f"a generator with `{method}`",
            suggestion="run it at another level, or on another target",
        )  # fmt: skip
    return generator
