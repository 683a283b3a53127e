"""The code generators there are, by name."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from tessera.codegen.backend import Backend
from tessera.errors import ArgumentError, UnknownNameError

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
        ArgumentError: it cannot be configured, or not so.
    """
    name, colon, options = name.partition(":")
    found = backends().get(name)
    if found is None:
        raise UnknownNameError(f'"{name}" is not a code generator', expected=", ".join(sorted(backends())))
    generator = found.load()
    if not colon:
        return generator
    if not hasattr(generator, "configured"):
        raise ArgumentError(f"the target {name} takes nothing after a colon", received=options)
    return generator.configured(options)
