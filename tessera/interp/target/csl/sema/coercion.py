"""Implicit conversion (coercion) of expression values to a type, and their rendering as Python code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.core.errors import Location
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.context import AnalysisContext, ExprValue, list_members, make_known, make_runtime
from tessera.interp.target.csl.sema.values import Pointer
from tessera.interp.target.csl.text.diagnostics import fail, type_mismatch


def coerce(f: AnalysisContext, o: ExprValue, to: t.CslType, loc: Location) -> ExprValue:
    """Convert `o` to type `to` where the language allows an implicit conversion; otherwise fail."""
    if o.type is to or o.type == to or to is t.ANYTYPE:
        return o
    for fits, convert in COERCION_RULES:
        if fits(o, to):
            return convert(f, o, to, loc)
    type_mismatch(loc, to, o.type)


def _coerce_integer(f: AnalysisContext, o: ExprValue, to: t.CslInt, loc: Location) -> ExprValue:
    if not o.known:
        return make_runtime(to, o.code, loc)
    if not to.low <= o.const <= to.high:
        fail(loc, f"integer value '{o.const}' cannot be represented in type '{to}'")
    return make_known(to, int(o.const), loc)


def _coerce_float(f: AnalysisContext, o: ExprValue, to: t.CslFloat, loc: Location) -> ExprValue:
    if not o.known:
        return make_runtime(to, f"{f.unit.add_constant(to.dtype.type)}({o.code})", loc)
    data = to.dtype.type(o.const)
    if np.isinf(np.float32(data)) and not np.isinf(o.const):
        fail(loc, f"cast from '{o.type}' to '{to}' failed")
    return make_known(to, data, loc)


def _keep_address(f: AnalysisContext, o: ExprValue, to: t.CslType, loc: Location) -> ExprValue:
    return ExprValue(to, o.const, o.code, o.place, loc=loc)


def _is_pointer_compatible(o: ExprValue, to: t.CslType) -> bool:
    a = o.type
    if not (isinstance(a, t.CslPointer) and isinstance(to, t.CslPointer)) or (a.const and not to.const):
        return False
    if a.many == to.many and a.element == to.element:
        return True
    return to.many and not a.many and isinstance(a.element, t.CslArray) and a.element.element == to.element


def _coerce_enum(f: AnalysisContext, o: ExprValue, to: t.CslEnum, loc: Location) -> ExprValue:
    names = dict(to.members)
    if o.const not in names:
        fail(loc, f"enum '{to}' has no member named '{o.const}'")
    return make_known(to, names[o.const], loc)


def make_zero(type_: t.CslType) -> Any:
    """The data of a value whose bits are all zero."""
    if isinstance(type_, t.CslArray):
        return np.zeros(type_.count, type_.dtype)
    if isinstance(type_, t.CslStruct):
        return np.zeros(1, type_.dtype)
    return 0 if type_.dtype.kind == "O" else np.zeros((), type_.dtype)[()]


def _coerce_undefined(f: AnalysisContext, o: ExprValue, to: t.CslType, loc: Location) -> ExprValue:
    data = make_zero(to)
    return make_known(to, to_python_scalar(data, to), loc)


def to_python_scalar(data: Any, type_: t.CslType) -> Any:
    """Convert a NumPy scalar of an integer-like type to a Python int."""
    if isinstance(type_, (t.CslInt, t.CslEnum, t.CslHandle)) and isinstance(data, np.generic):
        return data.item()
    return data


def _coerce_struct(f: AnalysisContext, o: ExprValue, to: t.CslStruct, loc: Location) -> ExprValue:
    members = list_members(o)
    for name in members:
        if to.field(name) is None:
            fail(loc, f"struct '{to}' has no field named '{name}'")
    rows = {n: coerce(f, members[n], field, loc) for n, field in to.fields if n in members}
    if len(rows) < len(to.fields) and not to.union:
        lacking = next(n for n, _ in to.fields if n not in rows)
        fail(loc, f"missing value for struct field '{lacking}'")
    return make_struct(f, to, rows, loc)


def make_struct(f: AnalysisContext, to: t.CslStruct, rows: dict[str, ExprValue], loc: Location) -> ExprValue:
    """A struct value with the given fields."""
    if all(o.known for o in rows.values()):
        data = np.zeros(1, to.dtype)
        for name, o in rows.items():
            data[name][0] = o.const
        return make_known(to, data, loc)
    name = f.make_name("s")
    f.emit(f"{name} = zeros(1, {f.unit.add_constant(to.dtype)})", loc)
    for field, o in rows.items():
        f.emit(f"{name}[{field!r}][0] = {render_code(f, o)}", loc)
    return make_runtime(to, name, loc)


def _coerce_array(f: AnalysisContext, o: ExprValue, to: t.CslArray, loc: Location) -> ExprValue:
    items = [coerce(f, x, to.element, loc) for x in list_members(o).values()]
    if len(items) != to.count:
        fail(loc, f"expected {to.count} array elements; found {len(items)}")
    return make_array(f, to, items, loc)


def make_array(f: AnalysisContext, to: t.CslArray, items: list[ExprValue], loc: Location) -> ExprValue:
    """An array value with the given elements."""
    data = np.zeros(to.count, to.dtype)
    for i, o in enumerate(items):
        if o.known:
            store_cell(data, i, o.const)
    if all(o.known for o in items):
        return make_known(to, data, loc)
    name = f.make_name("a")
    f.emit(f"{name} = {f.unit.add_constant(data)}.copy()", loc)
    for i, o in enumerate(items):
        if not o.known:
            f.emit(f"{name}[{i}] = {render_code(f, o)}", loc)
    return make_runtime(to, name, loc)


def store_cell(data: np.ndarray[Any, Any], index: int, value: Any) -> None:
    """Store one value in an array cell; pointers and descriptors, which are tuples, stay one object."""
    if data.dtype == object:
        cell = np.empty(1, object)
        cell[0] = value
        data[index : index + 1] = cell
    else:
        data[index] = value


# Types whose values also act as anonymous structs.
STRUCT_VIEWS: dict[t.CslType, Callable[[ExprValue], ExprValue]] = {}

COERCION_RULES: tuple[tuple[Any, Any], ...] = (
    (
        lambda o, to: isinstance(to, t.CslInt) and (o.type is t.COMPTIME_INT or (o.known and t.is_integer(o.type))),
        _coerce_integer,
    ),
    (lambda o, to: isinstance(to, t.CslFloat) and o.type is t.COMPTIME_FLOAT, _coerce_float),
    (_is_pointer_compatible, _keep_address),
    (lambda o, to: isinstance(to, t.CslEnum) and o.type is t.ENUM_LITERAL, _coerce_enum),
    (lambda o, to: o.type is t.UNDEFINED, _coerce_undefined),
    (lambda o, to: isinstance(to, t.CslStruct) and o.type is t.ANON, _coerce_struct),
    (lambda o, to: isinstance(to, t.CslArray) and o.type is t.ANON, _coerce_array),
    (lambda o, to: to is t.ANON and o.type in STRUCT_VIEWS, lambda f, o, to, loc: STRUCT_VIEWS[o.type](o)),
    (lambda o, to: to is t.COMPTIME_INT and o.known and t.is_integer(o.type), _keep_address),
    (lambda o, to: to is t.COMPTIME_FLOAT and o.known and isinstance(o.type, t.CslFloat), _keep_address),
)


def render_code(f: AnalysisContext, o: ExprValue) -> str:
    """The Python expression of an operand."""
    if o.fields is not None:
        return "{" + ", ".join(f"{n!r}: {render_code(f, x)}" for n, x in o.fields.items()) + "}"
    if not o.known:
        return o.code
    data = o.const
    if data is None or isinstance(data, (bool, np.bool_)):
        return repr(None if data is None else bool(data))
    if isinstance(data, int):
        return repr(data) if data >= 0 else f"({data})"
    return f.unit.render_constant(o)


def render_pointer(f: AnalysisContext, o: ExprValue) -> tuple[str, str]:
    """The code of a pointer's array and index."""
    if o.known:
        where: Pointer = o.const
        return f.unit.add_constant(where.array), str(where.index)
    name = f.make_name("p")
    return f"({name} := {o.code})[0]", f"{name}[1]"
