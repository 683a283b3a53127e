"""The libraries written in Python, as modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tessera.errors import Location
from tessera.interp.target.csl.sema.operand import Operand, Place
from tessera.interp.target.csl.values import Global, Pointer, Value

if TYPE_CHECKING:
    from tessera.interp.target.csl.sema.unit import Unit

Factory = Callable[["Unit", dict[str, Value]], dict[str, Value]]
# The libraries written in Python, by the name in angle brackets.
LIBRARIES: dict[str, Factory] = {}


def library(name: str) -> Callable[[Factory], Factory]:
    """Register a library: `factory(unit, params)` gives the members of the module."""

    def add(factory: Factory) -> Factory:
        LIBRARIES[name] = factory
        return factory

    return add


class NativeModule:
    """A library module."""

    def __init__(self, title: str, members: dict[str, Value]) -> None:
        self.title, self.members = title, members

    def lookup(self, name: str, loc: Location) -> Operand | None:
        """What a member means, or None."""
        found = self.members.get(name)
        if found is None:
            return None
        return variable_operand(found.data) if isinstance(found.data, Global) else Operand(*found, loc=loc)


def variable_operand(made: Global) -> Operand:
    """What the name of a global variable means."""

    def take() -> Pointer:
        made.addressed = True
        return Pointer(made, 0)

    n, type_ = made.number, made.type
    if type_.aggregate:
        return Operand(type_, code=f"G{n}", place=Place(True, f"G{n}", take=take), loc=made.loc)
    return Operand(type_, code=f"R{n}_", place=Place(True, f"G{n}", store=f"W{n}_", take=take), loc=made.loc)
