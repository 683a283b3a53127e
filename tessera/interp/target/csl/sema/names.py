"""Names and literals, and how a value is read from its place."""

from __future__ import annotations

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail, type_mismatch
from tessera.interp.target.csl.sema.coerce import plain
from tessera.interp.target.csl.sema.frame import Frame, meaning
from tessera.interp.target.csl.sema.operand import Operand, Place, known
from tessera.interp.target.csl.values import DIRECTIONS, Global

_LITERALS = ((bool, t.BOOL), (int, t.COMPTIME_INT), (float, t.COMPTIME_FLOAT), (str, t.STRING))
_BUILTIN_NAMES = {name: (t.DIRECTION, i) for i, name in enumerate(DIRECTIONS)}


@meaning(s.Literal)
def _literal(f: Frame, node: s.Literal) -> Operand:
    for python, type_ in _LITERALS:
        if isinstance(node.value, python):
            return known(type_, node.value, node.loc)
    return known(t.UNDEFINED, None, node.loc)


@meaning(s.EnumLiteral)
def _enum_literal(f: Frame, node: s.EnumLiteral) -> Operand:
    return known(t.ENUM_LITERAL, node.name, node.loc)


@meaning(s.Name)
def _name(f: Frame, node: s.Name) -> Operand:
    found = f.find(node.text) or f.module.lookup(node.text, node.loc)
    if found is not None:
        return current(found).at(node.loc) if found.place else found
    if node.text in t.NAMED and not (node.text == "comptime_struct" and f.unit.options.sdk != "1.4"):
        return known(t.TYPE, t.NAMED[node.text], node.loc)
    if node.text in _BUILTIN_NAMES:
        return known(*_BUILTIN_NAMES[node.text], node.loc)
    number = t.integer(node.text)
    if number is not None:
        return known(t.TYPE, number, node.loc)
    fail(node.loc, f"use of undeclared identifier '{node.text}'")


def current(o: Operand) -> Operand:
    """A name's operand, with the present value where it is a comptime variable."""
    if o.known or o.code or o.place is None or o.place.take is None:
        return Operand(o.type, o.const, o.code, o.place, o.fields)
    return fetched(o.type, o.place)


def fetched(type_: t.Type, place: Place) -> Operand:
    """What stands at a comptime pointer: a known value, or code where a PE holds the memory."""
    assert place.take is not None
    where = place.take()
    if isinstance(where.array, Global):
        return read(type_, Place(place.mutable, f"G{where.array.number}", str(where.index), take=place.take))
    if type_.aggregate:
        size = type_.count if isinstance(type_, t.Array) else 1
        return Operand(type_, where.array[where.index : where.index + size], place=place)
    return Operand(type_, plain(where.array[where.index], type_), place=place)


def read(type_: t.Type, place: Place, loc: Location | None = None) -> Operand:
    """The value of a cell or a block of memory at run time."""
    array, index = place.array, place.index
    if isinstance(type_, t.Array):
        text = f"{array}[{index}:{index} + {type_.count}]" if index.isidentifier() or index.isdigit() else ""
        text = text or f"window({array}, {index}, {type_.count})"
    elif type_.aggregate:
        text = f"window({array}, {index}, 1)"
    else:
        text = f"{array}[{index}]" if type_.dtype.kind in "fOV" else f"{array}.item({index})"
    return Operand(type_, code=text, place=place)


def type_of(f: Frame, node: s.Syntax) -> t.Type:
    """The type that an expression names."""
    with f.evaluating():
        o = f.value(node)
    if o.type is not t.TYPE:
        type_mismatch(node.loc, t.TYPE, o.type)
    return o.const
