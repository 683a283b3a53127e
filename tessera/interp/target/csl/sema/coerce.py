"""Making an operand fit a type, and the Python code of an operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.errors import Location
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail, type_mismatch
from tessera.interp.target.csl.sema.frame import Frame
from tessera.interp.target.csl.sema.operand import Operand, known, members, runtime
from tessera.interp.target.csl.values import Pointer


def coerce(f: Frame, o: Operand, to: t.Type, loc: Location) -> Operand:
    """`o` as a value of type `to`, where the language converts implicitly; refuses otherwise."""
    if o.type == to or to is t.ANYTYPE:
        return o
    for fits, convert in RULES:
        if fits(o, to):
            return convert(f, o, to, loc)
    type_mismatch(loc, to, o.type)


def _integer(f: Frame, o: Operand, to: t.Int, loc: Location) -> Operand:
    if not o.known:
        return runtime(to, o.code, loc)
    if not to.low <= o.const <= to.high:
        fail(loc, f"integer value '{o.const}' cannot be represented in type '{to}'")
    return known(to, int(o.const), loc)


def _float(f: Frame, o: Operand, to: t.Float, loc: Location) -> Operand:
    if not o.known:
        return runtime(to, f"{f.unit.constant(to.dtype.type)}({o.code})", loc)
    data = to.dtype.type(o.const)
    if np.isinf(np.float32(data)) and not np.isinf(o.const):
        fail(loc, f"cast from '{o.type}' to '{to}' failed")
    return known(to, data, loc)


def _same_address(f: Frame, o: Operand, to: t.Type, loc: Location) -> Operand:
    return Operand(to, o.const, o.code, o.place, loc=loc)


def _pointer_fits(o: Operand, to: t.Type) -> bool:
    a = o.type
    if not (isinstance(a, t.Pointee) and isinstance(to, t.Pointee)) or (a.const and not to.const):
        return False
    if a.many == to.many and a.element == to.element:
        return True
    return to.many and not a.many and isinstance(a.element, t.Array) and a.element.element == to.element


def _enum(f: Frame, o: Operand, to: t.Enum, loc: Location) -> Operand:
    names = dict(to.members)
    if o.const not in names:
        fail(loc, f"enum '{to}' has no member named '{o.const}'")
    return known(to, names[o.const], loc)


def zero(type_: t.Type) -> Any:
    """The data of a value whose bits are all zero."""
    if isinstance(type_, t.Array):
        return np.zeros(type_.count, type_.dtype)
    if isinstance(type_, t.Struct):
        return np.zeros(1, type_.dtype)
    return 0 if type_.dtype.kind == "O" else np.zeros((), type_.dtype)[()]


def _undefined(f: Frame, o: Operand, to: t.Type, loc: Location) -> Operand:
    data = zero(to)
    return known(to, plain(data, to), loc)


def plain(data: Any, type_: t.Type) -> Any:
    """A NumPy scalar of an integer-like type as a Python number."""
    if isinstance(type_, (t.Int, t.Enum, t.Cell)) and isinstance(data, np.generic):
        return data.item()
    return data


def _struct(f: Frame, o: Operand, to: t.Struct, loc: Location) -> Operand:
    found = members(o)
    for name in found:
        if to.field(name) is None:
            fail(loc, f"struct '{to}' has no field named '{name}'")
    rows = {n: coerce(f, found[n], field, loc) for n, field in to.fields if n in found}
    if len(rows) < len(to.fields) and not to.union:
        lacking = next(n for n, _ in to.fields if n not in rows)
        fail(loc, f"missing value for struct field '{lacking}'")
    return aggregate(f, to, rows, loc)


def aggregate(f: Frame, to: t.Struct, rows: dict[str, Operand], loc: Location) -> Operand:
    """A struct value made of its fields."""
    if all(o.known for o in rows.values()):
        data = np.zeros(1, to.dtype)
        for name, o in rows.items():
            data[name][0] = o.const
        return known(to, data, loc)
    name = f.fresh("s")
    f.emit(f"{name} = zeros(1, {f.unit.constant(to.dtype)})", loc)
    for field, o in rows.items():
        f.emit(f"{name}[{field!r}][0] = {code(f, o)}", loc)
    return runtime(to, name, loc)


def _array(f: Frame, o: Operand, to: t.Array, loc: Location) -> Operand:
    items = [coerce(f, x, to.element, loc) for x in members(o).values()]
    if len(items) != to.count:
        fail(loc, f"expected {to.count} array elements; found {len(items)}")
    return array(f, to, items, loc)


def array(f: Frame, to: t.Array, items: list[Operand], loc: Location) -> Operand:
    """An array value made of its elements."""
    data = np.zeros(to.count, to.dtype)
    for i, o in enumerate(items):
        if o.known:
            store(data, i, o.const)
    if all(o.known for o in items):
        return known(to, data, loc)
    name = f.fresh("a")
    f.emit(f"{name} = {f.unit.constant(data)}.copy()", loc)
    for i, o in enumerate(items):
        if not o.known:
            f.emit(f"{name}[{i}] = {code(f, o)}", loc)
    return runtime(to, name, loc)


def store(data: np.ndarray[Any, Any], index: int, value: Any) -> None:
    """Put one value in a cell; tuples (pointers, descriptors) stay whole."""
    if data.dtype == object:
        cell = np.empty(1, object)
        cell[0] = value
        data[index : index + 1] = cell
    else:
        data[index] = value


# Values that show themselves as anonymous structs, by their types.
PARTS: dict[t.Type, Callable[[Operand], Operand]] = {}

RULES: tuple[tuple[Any, Any], ...] = (
    (
        lambda o, to: isinstance(to, t.Int) and (o.type is t.COMPTIME_INT or (o.known and t.is_integer(o.type))),
        _integer,
    ),
    (lambda o, to: isinstance(to, t.Float) and o.type is t.COMPTIME_FLOAT, _float),
    (_pointer_fits, _same_address),
    (lambda o, to: isinstance(to, t.Enum) and o.type is t.ENUM_LITERAL, _enum),
    (lambda o, to: o.type is t.UNDEFINED, _undefined),
    (lambda o, to: isinstance(to, t.Struct) and o.type is t.ANON, _struct),
    (lambda o, to: isinstance(to, t.Array) and o.type is t.ANON, _array),
    (lambda o, to: to is t.ANON and o.type in PARTS, lambda f, o, to, loc: PARTS[o.type](o)),
    (lambda o, to: to is t.COMPTIME_INT and o.known and t.is_integer(o.type), _same_address),
    (lambda o, to: to is t.COMPTIME_FLOAT and o.known and isinstance(o.type, t.Float), _same_address),
)


def code(f: Frame, o: Operand) -> str:
    """The Python expression of an operand."""
    if o.fields is not None:
        return "{" + ", ".join(f"{n!r}: {code(f, x)}" for n, x in o.fields.items()) + "}"
    if not o.known:
        return o.code
    data = o.const
    if data is None or isinstance(data, (bool, np.bool_)):
        return repr(None if data is None else bool(data))
    if isinstance(data, int):
        return repr(data) if data >= 0 else f"({data})"
    return f.unit.constant_code(o)


def pointer_code(f: Frame, o: Operand) -> tuple[str, str]:
    """The array and the index of a pointer, as code."""
    if o.known:
        where: Pointer = o.const
        return f.unit.constant(where.array), str(where.index)
    name = f.fresh("p")
    return f"({name} := {o.code})[0]", f"{name}[1]"
