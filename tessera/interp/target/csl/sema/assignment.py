"""Assignment."""

from __future__ import annotations

from typing import Any

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail
from tessera.interp.target.csl.sema.coerce import code, coerce, store
from tessera.interp.target.csl.sema.frame import Frame, meaning
from tessera.interp.target.csl.sema.names import read
from tessera.interp.target.csl.sema.operand import VOID, Operand, Place
from tessera.interp.target.csl.sema.operators import binary
from tessera.interp.target.csl.values import Global, Pointer


@meaning(s.Assign)
def _assign(f: Frame, node: s.Assign) -> Operand:
    if isinstance(node.target, s.Name) and node.target.text == "_":
        f.run(node.value)
        return VOID
    target = f.operand(node.target)
    if target.place is None or not target.place.mutable:
        fail(node.target.loc, "cannot assign to constant")
    if node.sign and not target.known:
        target = _stable(f, target, node.loc)
    value = f.value(node.value)
    if node.sign:
        value = binary(f, node.sign, target, value, node.loc)
    assign(f, target, coerce(f, value, target.type, node.value.loc), node.loc)
    return VOID


def _stable(f: Frame, target: Operand, loc: Location) -> Operand:
    """The same cell with its address worked out once: `a[f()] += 1` reads and writes it."""
    place = target.place
    assert place is not None
    if place.store or target.type.aggregate:
        return target
    array, index = place.array, place.index
    if not array.isidentifier():
        array = f.fresh("m")
        f.emit(f"{array} = {place.array}", loc)
    if not (index.isidentifier() or index.isdigit()):
        index = f.fresh("i")
        f.emit(f"{index} = {place.index}", loc)
    return read(target.type, Place(True, array, index))


def assign(f: Frame, target: Operand, value: Operand, loc: Location) -> None:
    """Write a value of the right type to a place."""
    place = target.place
    assert place is not None
    f.cost += 2
    if place.take is not None and not place.array and not place.store:
        where = place.take()
        if not isinstance(where.array, Global):
            _assign_known(f, where, target.type, value, loc)
            return
        place = Place(True, f"G{where.array.number}", str(where.index))
    if f.comptime:
        fail(loc, "cannot assign to a run-time variable at compile time")
    text = code(f, value)
    if place.store:
        f.emit(f"{place.store} = {text}", loc)
    elif target.type.aggregate:
        count = target.type.count if isinstance(target.type, t.Array) else 1
        f.emit(f"window({place.array}, {place.index}, {count})[:] = {text}", loc)
    elif target.type.dtype.kind == "O":
        f.emit(f"put({place.array}, {place.index}, {text})", loc)
    else:
        f.emit(f"{place.array}[{place.index}] = {text}", loc)


def _assign_known(f: Frame, where: Pointer, type_: t.Type, value: Operand, loc: Location) -> None:
    if not value.known:
        fail(loc, "value assigned to a comptime variable is not known at compile time")
    array: Any = where.array
    if type_.aggregate:
        array[where.index : where.index + len(value.const)] = value.const
    else:
        store(array, where.index, value.const)
