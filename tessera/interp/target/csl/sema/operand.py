"""What an expression means: a type with a value known now, or with the Python code that gives it at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera.errors import UNKNOWN, Location
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.values import Pointer, Value

MISSING: Any = object()


class Place:
    """Where a value stands in memory: `array[index]` as code, or as a comptime pointer.

    `load` and `store` are code where a cell has a faster form (a Python local or global); `take` gives the
    comptime pointer, and makes the memory for a constant that has none yet.
    """

    __slots__ = ("mutable", "array", "index", "store", "take")

    def __init__(
        self,
        mutable: bool,
        array: str = "",
        index: str = "0",
        store: str = "",
        take: Callable[[], Pointer] | None = None,
    ) -> None:
        self.mutable, self.array, self.index, self.store, self.take = mutable, array, index, store, take


class Operand:
    """The meaning of one expression. Exactly one of `const`, `code` and `fields` is set."""

    __slots__ = ("type", "const", "code", "place", "fields", "loc", "waits")

    def __init__(
        self,
        type_: t.Type,
        const: Any = MISSING,
        code: str = "",
        place: Place | None = None,
        fields: dict[str, Operand] | None = None,
        loc: Location = UNKNOWN,
    ) -> None:
        self.type, self.const, self.code = type_, const, code
        self.place, self.fields, self.loc = place, fields, loc

    @property
    def known(self) -> bool:
        """Whether the value is known at compile time."""
        return self.const is not MISSING

    @property
    def value(self) -> Value:
        """The comptime value."""
        assert self.known
        return Value(self.type, self.const)

    def at(self, loc: Location) -> Operand:
        """The same, at another place of the text."""
        self.loc = loc
        return self


VOID = Operand(t.VOID, None)


def known(type_: t.Type, data: Any, loc: Location = UNKNOWN) -> Operand:
    """An operand whose value is known."""
    return Operand(type_, data, loc=loc)


def runtime(type_: t.Type, code: str, loc: Location = UNKNOWN, place: Place | None = None) -> Operand:
    """An operand that `code` computes."""
    return Operand(type_, code=code, place=place, loc=loc)


def from_value(value: Value, loc: Location = UNKNOWN) -> Operand:
    """An operand of a comptime value; an anonymous struct shows its fields."""
    return Operand(value.type, value.data, loc=loc)


def anonymous(fields: dict[str, Operand], loc: Location) -> Operand:
    """An anonymous struct: known if each field is."""
    if all(o.known for o in fields.values()):
        return Operand(t.ANON, {n: o.value for n, o in fields.items()}, loc=loc)
    return Operand(t.ANON, fields=fields, loc=loc)


def members(operand: Operand) -> dict[str, Operand]:
    """The fields of an anonymous struct."""
    if operand.fields is not None:
        return operand.fields
    return {n: from_value(v, operand.loc) for n, v in operand.const.items()}
